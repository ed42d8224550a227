"""Record a target's texts and its draft's proposals, so that the controller can be replayed without models.

    uv run python -m benchmarks.traces OUT.json.gz [--target T] [--draft D] [--tokens 128] [--temperature 0]

OUT holds the target's text for each prompt and, at each position of the text, the draft model's greedy continuation:
eight tokens, each with up to seven runners-up and the draft's probabilities. stdout ends with one JSON line.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import DRAFT, MODEL_PATH, PLAIN, TARGET, generate, load_model, print_result
from edgespec.backends.options import LoadOptions
from edgespec.bench.prompt_sets import read_prompts, read_shipped_prompts, take_per_category
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter
from edgespec.core.protocols import Budget
from edgespec.core.sampling import SamplingParams
from edgespec.drafters.sequential import ModelDraftSession, SequentialDrafter
from edgespec.engine.engine import Engine
from edgespec.engine.events import Request
from edgespec.text.chat_template import encode_prompt

DEPTH = 8
CONTEXT = 2048


@click.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--target", type=MODEL_PATH, default=TARGET)
@click.option("--draft", type=MODEL_PATH, default=DRAFT)
@click.option("--tokens", type=click.IntRange(2), default=128, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--prompts", "file", type=MODEL_PATH, help="JSONL file.  [default: the shipped prompts]")
@click.option("--per-category", type=click.IntRange(1), default=3, show_default=True)
def main(
    out: Path, target: Path, draft: Path, tokens: int, temperature: float, file: Path | None, per_category: int
) -> None:
    """Write the traces of all prompts that fit into the context to OUT."""
    options = LoadOptions(threads=1, context_size=CONTEXT)
    engine = Engine(load_model("llamacpp", target, options), [], PLAIN)
    session = load_model("llamacpp", draft, options).open_session()
    drafter = SequentialDrafter("model", ModelDraftSession(session, engine.target.tokenizer.vocab_size))
    traces = []
    for prompt in take_per_category(read_prompts(file) if file else read_shipped_prompts(), per_category):
        ids = encode_prompt(engine.target.tokenizer, prompt.turns[0], parse_special=True)
        if len(ids) + tokens > CONTEXT:
            click.echo(f"{prompt.id} is left out: it does not fit into {CONTEXT} tokens", err=True)
            continue
        request = Request(prompt.turns[0], SamplingParams(temperature=temperature), tokens, seed=1)
        trace = record_trace(engine, drafter, ids, request)
        traces.append({"id": prompt.id, "category": prompt.category, **trace})
        click.echo(f"{prompt.id}: {len(ids)} + {len(trace['text'])} tokens", err=True)
    with gzip.open(out, "wt", encoding="utf-8") as stream:
        json.dump({"temperature": temperature, "traces": traces}, stream)
    texts = [{"id": trace["id"], "tokens": len(trace["text"])} for trace in traces]
    print_result("traces", {"temperature": temperature, "texts": texts}, target, draft)


def record_trace(engine: Engine, drafter: Drafter, prompt: list[int], request: Request) -> dict[str, Any]:
    """The prompt, the target's text and the draft's spine at each position of the text but the first."""
    finished = generate(engine, PLAIN, request)
    text = [*prompt, *finished.tokens]
    drafter.begin(prompt, None)
    spines = [record_spine(drafter, text[:end]) for end in range(len(prompt) + 1, len(text))]
    return {"prompt": prompt, "text": finished.tokens, "spines": spines}


def record_spine(drafter: Drafter, tokens: list[int]) -> list[tuple[list[int], list[float]]]:
    """[DEPTH] pairs of up to eight tokens and their probabilities: the draft's greedy continuation of `tokens`."""
    tree, name = DraftTree(), drafter.name
    for _ in drafter.expand(tree, tokens, Budget(DEPTH, DEPTH)):
        pass
    spine: list[tuple[list[int], list[float]]] = []
    parent = -1
    while nodes := tree.proposals(parent, name):
        spine.append(([tree.tokens[node] for node in nodes], [round(tree.votes[node][name], 4) for node in nodes]))
        parent = nodes[0]
    return spine


if __name__ == "__main__":
    main()
