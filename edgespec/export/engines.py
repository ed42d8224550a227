"""The engines as a table, the drafter that one of them takes, and the command that starts it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from edgespec.backends import FileBackend
from edgespec.errors import InvalidRequest
from edgespec.export.gather import Draft, Exported, ExportPlan, Weights
from edgespec.hub.cache import HubFile, HubQuant, HubReference, HubRepo, LocalPath, is_gguf_name, parse_quant

LOOKUPS = ("ngram", "suffix")
MODELFILE, TENSORRT_FILE = "edgespec.Modelfile", "tensorrt-llm.yml"
_USUAL_LENGTH = {  # a head that drafts a block has its own
    "model": 4, "eagle3": 3, "eagle": 3, "mtp": 2, "gemma4-assistant": 2, "dflash": 15, "dspark": 7, "medusa": 5,
    "pard": 8, "ngram": 5, "suffix": 24,
}  # fmt: skip
_ALWAYS = ""  # the remark holds whatever drafts


@dataclass(frozen=True, slots=True)
class Engine:
    """A program that serves models.

    title     its name for people, with the version whose source the keys were read in
    backend   whose files it loads; None for the original weights
    command   its first words, before those of the target
    methods   its own name of a drafter, by ours
    options   makes the words that turn a drafter of a length on
    target    makes the words that name the target, or what is served in its place for a draft
    quantize  the option that quantizes original weights to 8 bits at the start; "" without one
    remarks   a sentence about its drafts, and the drafters that it concerns
    files     makes the files that the command needs, by name
    has_many  whether it has lookups that work beside a draft, and find their lengths themselves
    measure   where it shows how many drafted tokens are accepted; "" where that is not known
    refuse    why it cannot load the files of a draft; None where it can
    compares  the drafters, by our name, whose vocab_size it compares with the target's when it starts
    """

    title: str
    backend: FileBackend | None
    command: tuple[str, ...]
    methods: Mapping[str, str]
    options: Callable[[ExportPlan, Draft, int], Sequence[str]]
    target: Callable[[ExportPlan, Draft | None], Sequence[str]] = lambda plan, draft: [plan.target.require_original()]
    quantize: str = ""
    remarks: Mapping[str, Collection[str]] = field(default_factory=dict)
    files: Callable[[ExportPlan, Draft | None, int], Mapping[str, str]] = lambda plan, draft, length: {}
    has_many: bool = False
    measure: str = ""
    refuse: Callable[[Draft], str | None] = lambda draft: None
    compares: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Choice:
    """The drafter that an engine takes.

    draft     None: the engine drafts nothing
    length    tokens that it drafts; None where the engine finds the number itself
    refusals  why others are not taken, by drafter, in the order of preference
    """

    draft: Draft | None
    length: int | None
    refusals: Mapping[str, str]


def export(plan: ExportPlan, engine: Engine) -> tuple[Choice, Exported]:
    """The commands and files for `engine`, with the first drafter that it takes.

    Raises InvalidRequest where the original weights are not known, or where it takes none of the drafters that the user
    named.
    """
    if engine.backend is None and plan.target.original is None:
        raise InvalidRequest(
            f"it is not known which weights {plan.name} was made from, and {engine.title} loads those.",
            hint="Name them: --target-id USER/REPO or FOLDER, or `originals` in models.toml.",
        )
    chosen: Draft | None = None
    refusals: dict[str, str] = {}
    for draft in plan.drafts:
        reason = find_obstacle(plan, draft, engine)
        if reason is not None:
            refusals[draft.label] = reason
        elif chosen is None:
            chosen = draft
        elif not (engine.has_many and draft.method in LOOKUPS):
            refusals[draft.label] = f"{engine.title} takes one drafter"
    if chosen is None and refusals and not plan.is_auto:
        label, reason = next(iter(refusals.items()))
        raise InvalidRequest(
            f"the drafter {label} cannot be exported: {reason}.", hint="Name another draft, or use --draft none."
        )
    length = find_length(chosen, engine) if chosen is not None else None
    return Choice(chosen, length, refusals), _render(plan, engine, chosen, length or 0)


def find_obstacle(plan: ExportPlan, draft: Draft, engine: Engine) -> str | None:
    """Why `engine` cannot use `draft`; None where it can."""
    if draft.method not in engine.methods:
        if draft.method == "self":
            return f"{engine.title} does not draft with parts of the target"
        return f"{engine.title} takes no drafter of the kind {draft.method}"
    if engine.backend is None and draft.weights is not None and draft.weights.original is None:
        return "it is not known which weights it was made from; name them with --draft-id USER/REPO"
    same = draft.weights is not None and draft.weights.original == plan.target.original
    if engine.backend is None and draft.method == "model" and same:
        return "it was made from the target's own weights"
    sizes = compare_vocabularies(plan, draft, engine)
    if sizes is not None and None not in sizes and sizes[0] != sizes[1]:
        return f"its vocab_size is {sizes[1]}, the target's {sizes[0]}, and {engine.title} takes equal ones alone"
    return engine.refuse(draft)


def compare_vocabularies(plan: ExportPlan, draft: Draft, engine: Engine) -> tuple[int | None, int | None] | None:
    """The vocab_size of the target and of `draft`, None where it is not known; None where `engine` takes any."""
    if draft.weights is None or draft.method not in engine.compares:
        return None
    return plan.target.vocab_size, draft.weights.vocab_size


def find_length(draft: Draft, engine: Engine) -> int | None:
    """Tokens to draft: those of a block, else a usual number; None where `engine` finds the number itself."""
    if engine.has_many and draft.method in LOOKUPS:
        return None
    return draft.block or _USUAL_LENGTH[draft.method]


def _render(plan: ExportPlan, engine: Engine, draft: Draft | None, length: int) -> Exported:
    files = engine.files(plan, draft, length)
    method = draft.method if draft is not None else _ALWAYS
    remarks = [
        text.format(length=length, half=max(1, length // 2))
        for text, methods in engine.remarks.items()
        if method in methods or _ALWAYS in methods
    ]
    if MODELFILE in files:
        name = _name_for_ollama(plan)
        commands: tuple[tuple[str, ...], ...] = (("ollama", "create", name, "-f", MODELFILE), ("ollama", "run", name))
    else:
        target = engine.target(plan, draft)
        options = engine.options(plan, draft, length) if draft is not None else ()
        commands = ((*engine.command, *target, *options),)
    if engine.backend is None and plan.target.is_quantized:
        start = f", or add {engine.quantize} for 8 bits" if engine.quantize else ""
        remarks.append(
            "The weights in use are quantized, the originals are not: serve a repository of them in FP8, AWQ, GPTQ or "
            f"NVFP4 instead{start}."
        )
    files_in_use = plan.target.files
    if engine.backend is not None and isinstance(files_in_use, HubReference) and files_in_use.revision is not None:
        remarks.append(f"{engine.title} takes no revision, and loads what {files_in_use.repo} has today.")
    return Exported(commands, files, tuple(remarks))


# vLLM, SGLang and TensorRT-LLM, which load the original weights. Rules that lose exactness,
# such as relaxed acceptance, are never turned on.


def _original(plan: ExportPlan, draft: Draft) -> str | None:
    """What to load for `draft`; None for lookups, and for a head in the target's own files."""
    is_own = draft.method == "mtp" and draft.weights is not None and draft.weights.original == plan.target.original
    return None if draft.weights is None or is_own else draft.weights.require_original()


def _vllm_options(plan: ExportPlan, draft: Draft, length: int) -> list[str]:
    config = {
        "method": _VLLM_METHODS[draft.method],
        "num_speculative_tokens": length,
        "model": _original(plan, draft),
        "parallel_drafting": True if draft.method == "pard" else None,
        "prompt_lookup_min": 2 if draft.method == "ngram" else None,
        "prompt_lookup_max": 5 if draft.method == "ngram" else None,
    }
    return ["--speculative-config", json.dumps({key: value for key, value in config.items() if value is not None})]


def _sglang_options(plan: ExportPlan, draft: Draft, length: int) -> list[str]:
    """The options of a chain. The acceptance thresholds, below 1 lossy, keep their default of 1."""
    method, model = _SGLANG_METHODS[draft.method], _original(plan, draft)
    sizes = {
        "DFLASH": {"dflash-block-size": length + 1},
        "DSPARK": {"dspark-block-size": length},
        # One branch: with more the rows of a round are branches, and paged attention refuses them.
        "NGRAM": {"ngram-max-bfs-breadth": 1, "num-draft-tokens": length + 1},
    }.get(method, {"num-steps": length, "eagle-topk": 1, "num-draft-tokens": length + 1})
    options = {"algorithm": method, **({"draft-model-path": model} if model else {}), **sizes}
    return [word for name, value in options.items() for word in (f"--speculative-{name}", str(value))]


def _tensorrt_files(plan: ExportPlan, draft: Draft | None, length: int) -> dict[str, str]:
    if draft is None:
        return {}
    config = {"decoding_type": _TENSORRT_METHODS[draft.method], "max_draft_len": length}
    if model := _original(plan, draft):
        config["speculative_model"] = model
    lines = [f"  {key}: {json.dumps(value)}\n" for key, value in config.items()]
    return {TENSORRT_FILE: "".join(["speculative_config:\n", *lines])}


# llama-server, mlx-lm and Ollama, which load the files in use.


def _name_on_hub(files: HubReference) -> str:
    """`user/repo` or `user/repo:QUANT`, without a revision, which these engines do not take."""
    match files:
        case HubFile(repo, file):
            return f"{repo}:{parse_quant(file)}"
        case HubQuant(repo, quant):
            return f"{repo}:{quant}"
    return files.repo


def _llama_target(plan: ExportPlan, _draft: Draft | None) -> list[str]:
    match plan.target.files:
        case LocalPath(path):
            return ["--model", str(path)]
        case HubFile(repo, file):
            return ["--hf-repo", repo, "--hf-file", file]
        case files:
            return ["--hf-repo", _name_on_hub(files)]


def _llama_options(plan: ExportPlan, draft: Draft, length: int) -> list[str]:
    words: list[str] = []
    match draft.weights.files if draft.weights is not None else None:
        case LocalPath(path):
            words = ["--spec-draft-model", str(path)]
        case HubFile() | HubQuant() | HubRepo() as files:
            words = ["--spec-draft-hf", _name_on_hub(files)]
    beside = [each.method for each in plan.drafts if each.method in LOOKUPS and each is not draft]
    words += ["--spec-type", ",".join(_LLAMA_METHODS[method] for method in (*beside, draft.method))]
    return words if draft.method in LOOKUPS else [*words, "--spec-draft-n-max", str(length)]


def _refuse_for_llama(draft: Draft) -> str | None:
    """Why a draft cannot be loaded: llama-server downloads those that are not here by their quantization alone."""
    files = draft.weights.files if draft.weights is not None else None
    if isinstance(files, HubFile) and ("/" in files.path or parse_quant(files.path) is None):
        return "llama-server cannot download this file; run `edgespec pull` first"
    return None


def _mlx_name(target: Weights) -> str:
    """The folder, or the repository. Raises InvalidRequest for a GGUF file, such as the embedded one."""
    if not isinstance(target.files, HubRepo | LocalPath) or is_gguf_name(str(target.files)):
        raise InvalidRequest(
            f"mlx-lm loads folders, and {target.reference} is a GGUF file.",
            hint="Export it to llama-server or ollama.",
        )
    return str(target.files.path) if isinstance(target.files, LocalPath) else target.files.repo


def _mlx_options(plan: ExportPlan, draft: Draft, length: int) -> list[str]:
    assert draft.weights is not None
    return ["--draft-model", _mlx_name(draft.weights), "--num-draft-tokens", str(length)]


def _write_modelfile(plan: ExportPlan, draft: Draft | None, length: int) -> dict[str, str]:
    """Ollama runs a file named by DRAFT as an MTP layer, or as a DFlash head where that is its architecture. An
    ordinary draft model or an EAGLE-3 head would be taken for the former, so neither is exported.

    Raises InvalidRequest for paths that no Modelfile holds.
    """
    match plan.target.files:
        case LocalPath(path):
            lines = [f"FROM {path}"]
        case HubFile(repo, file):
            lines = [f"FROM hf.co/{repo}:{parse_quant(file) if '/' in file else file}"]
        case files:
            lines = [f"FROM hf.co/{_name_on_hub(files)}"]
    if draft is not None and draft.weights is not None:
        lines.append(f"DRAFT {draft.weights.files}")
    if draft is not None:
        lines.append(f"PARAMETER draft_num_predict {length}")
    if any(not line.isprintable() for line in lines):
        raise InvalidRequest("a Modelfile cannot name a file with a line break in its path.", hint="Rename it.")
    return {MODELFILE: "".join(f"{line}\n" for line in lines)}


def _name_for_ollama(plan: ExportPlan) -> str:
    stem = plan.name.rsplit("/", 1)[-1].lower().removesuffix(".gguf")
    return re.sub(r"[^a-z0-9._-]+", "-", stem).strip("-.") or "model"


def _refuse_for_ollama(draft: Draft) -> str | None:
    if draft.weights is None or isinstance(draft.weights.files, LocalPath):
        return None
    return "Ollama takes a file, which is not on this machine; run `edgespec pull` first"


_VLLM_METHODS = {
    "model": "draft_model", "pard": "draft_model", "eagle3": "eagle3", "eagle": "eagle", "mtp": "mtp",
    "gemma4-assistant": "mtp", "dflash": "dflash", "dspark": "dspark", "ngram": "ngram", "suffix": "suffix",
}  # fmt: skip
_SGLANG_METHODS = {
    "model": "STANDALONE", "eagle3": "EAGLE3", "eagle": "EAGLE", "mtp": "NEXTN", "gemma4-assistant": "NEXTN",
    "dflash": "DFLASH", "dspark": "DSPARK", "ngram": "NGRAM", "suffix": "NGRAM",
}  # fmt: skip
_TENSORRT_METHODS = {
    "model": "Draft_Target", "pard": "PARD", "eagle3": "Eagle3", "mtp": "MTP", "gemma4-assistant": "MTP",
    "dflash": "DFlash", "dspark": "DSpark", "ngram": "NGram", "suffix": "SA",
}  # fmt: skip
_LLAMA_METHODS = {
    "model": "draft-simple", "eagle3": "draft-eagle3", "mtp": "draft-mtp", "gemma4-assistant": "draft-mtp",
    "dflash": "draft-dflash", "dspark": "draft-dspark", "ngram": "ngram-simple", "suffix": "ngram-mod",
}  # fmt: skip
_OLLAMA_METHODS = {"mtp": "mtp", "gemma4-assistant": "mtp", "dflash": "dflash"}

ENGINES: Mapping[str, Engine] = {
    "vllm": Engine(  # vllm/config/speculative.py
        "vLLM 0.33", None, ("vllm", "serve"), _VLLM_METHODS, _vllm_options,
        quantize="--quantization fp8", compares=frozenset({"model", "pard"}),
        measure="`--per-request-spec-decode-metrics summary` adds the accepted tokens to each response",
        remarks={
            "Under load shorter drafts pay: num_speculative_tokens_per_batch_size takes ranges of the batch size, such "
            "as [[1, 4, {length}], [5, 16, {half}]].": set(_VLLM_METHODS) - {"dspark"},
            "The method suffix needs the package arctic-inference.": ("suffix",),
            'If the draft\'s attention is refused, add "attention_backend": "FLASH_ATTN" to the JSON.':
                ("dflash", "dspark"),
        },
    ),
    "sglang": Engine(  # sglang/srt/arg_groups/fields/spec.py
        "SGLang 0.5.23", None, ("sglang", "serve", "--model-path"), _SGLANG_METHODS, _sglang_options,
        quantize="--quantization fp8", compares=frozenset({"model"}),
        measure="its log shows `accept len`, the tokens of a round",
        remarks={
            "`--speculative-adaptive` lets SGLang change the length; `--speculative-eagle-topk 4` with more "
            "`--speculative-num-draft-tokens` drafts trees.": ("eagle", "eagle3", "mtp", "gemma4-assistant"),
        },
    ),
    "tensorrt-llm": Engine(  # tensorrt_llm/llmapi/llm_args.py, November 2026
        "TensorRT-LLM", None, ("trtllm-serve",), _TENSORRT_METHODS, lambda *_: ("--config", TENSORRT_FILE),
        files=_tensorrt_files,
        remarks={
            "Older releases call the option --extra_llm_api_options, the type DraftTarget, and the key "
            "speculative_model_dir.": tuple(_TENSORRT_METHODS),
            "Older releases have num_nextn_predict_layers in place of max_draft_len. The documents name DeepSeek's "
            "models for MTP: check that this target is among those of your release.": ("mtp",),
        },
    ),
    "llama-server": Engine(  # common/arg.cpp of the llama.cpp that edgespec builds
        "llama-server", "llamacpp", ("llama-server",), _LLAMA_METHODS, _llama_options, _llama_target,
        has_many=True, refuse=_refuse_for_llama,
        measure="`timings` of a response has draft_n and draft_n_accepted",
    ),
    "mlx-lm": Engine(  # mlx_lm/server.py of version 0.32.2
        "mlx-lm 0.32", "mlx", ("mlx_lm.server", "--model"), {"model": "draft model"}, _mlx_options,
        lambda plan, _draft: [_mlx_name(plan.target)],
        remarks={
            "`mlx_lm.generate` takes the same options, and --prompt.": (_ALWAYS,),
            "With a draft model mlx_lm.server answers one request at a time.": ("model",),
        },
    ),
    "ollama": Engine(  # parser/parser.go of version 0.33.0-rc2
        "Ollama 0.33", "llamacpp", ("serve",), _OLLAMA_METHODS, lambda *_: (), files=_write_modelfile,
        refuse=_refuse_for_ollama,
        remarks={"Older versions of Ollama do not know DRAFT and draft_num_predict.": tuple(_OLLAMA_METHODS)},
    ),
}  # fmt: skip
