"""The examples that end the help of each command."""

from __future__ import annotations

# By command: a command line, and what it does.
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "chat": (
        ("edgespec chat", "chat with the model that was opened last, at first a small one"),
        ("edgespec chat llama-8b-q4", "chat with a model of `edgespec list`"),
        ("edgespec chat --continue", "go on with the last conversation"),
        ("edgespec chat --resume 12", "go on with one that `edgespec history` lists"),
    ),
    "run": (
        ('edgespec run "Name three rivers of Africa."', "a question to the demo model"),
        ('edgespec run "Summarize this." < notes.txt', "a prompt with a file"),
        ('edgespec run "Why is the sky blue?" -m llama-8b-q4 --json', "the answer and its statistics as JSON"),
    ),
    "history": (
        ("edgespec history", "the last conversations"),
        ("edgespec history binary search", "those in which both words occur"),
    ),
    "memory": (
        ("edgespec memory add ~/project", "answers about it are drafted from its files"),
        ("edgespec memory status", "what is kept"),
    ),
    "memory add": (
        ("edgespec memory add ~/project", "its text files, but what .gitignore excludes"),
        ("edgespec memory add docs notes.md -m llama-8b-q4", "for models with this tokenizer"),
        ("edgespec memory add --dry-run .", "list the files"),
    ),
    "memory status": (("edgespec memory status --json", "as JSON"),),
    "memory export": (("edgespec memory export texts.jsonl", "read what is kept"),),
    "memory forget": (
        ("edgespec memory forget 12", "a conversation that `edgespec history` lists"),
        ("edgespec memory forget ~/project/docs", "the documents in a folder"),
    ),
    "memory clear": (
        ("edgespec memory clear", "remove all texts"),
        ("edgespec memory clear --corpus", "remove the added documents"),
        ("edgespec memory clear --key laptop", "remove the texts of an API key"),
    ),
    "doctor": (("edgespec doctor", "check this machine"), ("edgespec doctor --gpu", "and what its device computes")),
    "recommend": (
        ("edgespec recommend", "the models that suit this machine"),
        ("edgespec recommend --for code --max-size 10", "for code, at most 10 GiB to download"),
        ("edgespec recommend qwen 8b", "search the hub as well"),
    ),
    "list": (("edgespec list", "aliases, downloads, models of other programs"),),
    "pull": (
        ("edgespec pull qwen3.5-9b-q4", "a model of `edgespec list`, with its draft"),
        ("edgespec pull unsloth/Qwen3-8B-GGUF:Q5_K_M", "a quantization of a repository"),
    ),
    "show": (("edgespec show llama-8b-q4", "architecture, size and memory"),),
    "plan": (
        ("edgespec plan qwen3.5-9b-q4", "memory and speed, before the download"),
        ("edgespec plan ./model.gguf --ctx 32768", "with a context of 32,768 tokens"),
    ),
    "rm": (("edgespec rm llama-8b-q4", "remove a downloaded model"),),
    "serve": (
        ("edgespec serve llama-8b-q4", "at http://127.0.0.1:7437/v1"),
        ("edgespec serve coder=./coder.gguf big=llama-70b-q4", "two models, by names of your own"),
    ),
    "key": (("edgespec key add laptop", "make a key for a client and print it"),),
    "key add": (
        ("edgespec key add laptop", "a key that may generate"),
        ("edgespec key add admin --manage", "one that may also load and unload models"),
    ),
    "key list": (("edgespec key list", "the names of the keys, and what they may do"),),
    "key rm": (("edgespec key rm laptop", "the server refuses the key from then on"),),
    "service": (
        ("edgespec service systemd llama-8b-q4 --ctx 16384", "for ~/.config/systemd/user/edgespec.service"),
        ("edgespec service launchd", "for ~/Library/LaunchAgents"),
    ),
    "ps": (("edgespec ps", "the models of the running server"),),
    "stop": (("edgespec stop llama-8b-q4", "free the memory of a model"),),
    "launch": (
        ("edgespec launch claude", "print the settings of Claude Code"),
        ('eval "$(edgespec launch aider)"', "start aider with the server's first model"),
    ),
    "worker": (
        ("edgespec worker", "lend the GPUs, or the processor, of this machine"),
        ("edgespec worker --threads 4 --port 50053", "a part of the processor, at another port"),
        ("edgespec worker --host 10.0.0.2 --trust-network", "on a network where every machine is trusted"),
    ),
    "export": (
        ("edgespec export --to vllm llama-70b-q4", "vLLM with the original weights and their draft"),
        ("edgespec export --to ollama ./m.gguf -o out", "files in a folder"),
    ),
    "bench": (
        ("edgespec bench", "the demo model"),
        ("edgespec bench llama-8b-q4 --category code_edit --draft-max 4", "one length of drafts on edits of code"),
    ),
    "verify": (
        ("edgespec verify smollm2-135m", "60 requests with every drafter"),
        ("edgespec verify llama-8b-q4 --draft ngram --requests mine.jsonl --json", "your own, as JSON"),
    ),
    "tune": (("edgespec tune llama-8b-q4", "measure once, for all later runs"),),
    "adapt": (
        ("edgespec adapt python-6m", "train the draft of the embedded model on what it has answered here"),
        ("edgespec adapt llama-70b-q4 --minutes 30", "no longer than half an hour"),
        ("edgespec adapt list", "the trained drafts, and what they gain"),
    ),
    "adapt train": (
        ("edgespec adapt train --method lora", "train low-rank changes only"),
        ("edgespec adapt train --no-documents --yes", "from answers alone, without a question"),
    ),
    "adapt list": (("edgespec adapt list --json", "as JSON"),),
    "adapt use": (("edgespec adapt use 0", "the draft before any training"),),
    "draft": (
        ("edgespec draft compare llama-8b-q4 llama-1b.gguf", "whether a draft model pays, and how much"),
        ("edgespec draft build llama-8b-q4", "find the best self-draft of a model"),
    ),
    "draft compare": (
        ("edgespec draft compare qwen3-32b-q4 unsloth/Qwen3-0.6B-GGUF unsloth/Qwen3-1.7B-GGUF", "two siblings"),
        ("edgespec draft compare llama-8b-q4 llama-1b.gguf layerskip:8 --json", "a file and a self-draft, as JSON"),
    ),
    "draft build": (
        ("edgespec draft build llama-8b-q4", "try all methods"),
        ("edgespec draft build llama-8b-q4 --draft layerskip", "only by skipping layers"),
    ),
    "draft train": (
        ("edgespec draft train smollm2-135m --minutes 60", "a head that learns from the model's own answers"),
        ("edgespec draft train --texts questions.jsonl", "answers to your questions first"),
    ),
    "draft list": (("edgespec draft list", "what is cached"),),
    "draft rm": (("edgespec draft rm all", "remove all self-drafts"),),
    "completion": (
        ('eval "$(edgespec completion bash)"', "for this shell; put it into ~/.bashrc"),
        ('eval "$(edgespec completion zsh)"', "the same for ~/.zshrc"),
        ("edgespec completion fish | source", "the same for ~/.config/fish/config.fish"),
    ),
}


def format_examples(name: str) -> str:
    """The examples of a command as click's epilog, which keeps the lines of a paragraph that begins with \\b."""
    examples = EXAMPLES[name]
    width = max(len(line) for line, _ in examples)
    if width > 48:  # explanations that would not fit beside the longest line are above it
        lines = [each for line, told in examples for each in (f"  # {told}", f"  {line}")]
    else:
        lines = [f"  {line:{width}}  # {told}" for line, told in examples]
    return "\n".join(["\b", "Examples:", *lines])
