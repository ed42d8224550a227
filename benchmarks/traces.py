"""Record texts of a target and what its draft would have proposed, for replaying the controller without models.

    uv run python -m benchmarks.traces OUT.json.gz [--target T] [--draft D] [--tokens 128] [--temperature 0]

For each prompt the target's text, and at each of its positions the draft model's greedy continuation: eight tokens,
each with up to three runners-up, and the probabilities that the draft gives them.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import click

from edgespec.backends import Model, open_model
from edgespec.backends.options import LoadOptions
from edgespec.bench.prompt_sets import read_prompts, read_shipped_prompts, take_per_category
from edgespec.core.sampling import SamplingParams
from edgespec.drafters.draft_model import DraftModelStepper, GreedyTopK
from edgespec.engine.drafting import Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.text.chat_template import encode_prompt
from laboratory.cost_faithful import EMBEDDED

DEPTH = 8
CONTEXT = 2048


def spine(stepper: DraftModelStepper, tokens: list[int]) -> list[list[list[float]]]:
    """[DEPTH][2][up to 4]: tokens and probabilities at each depth of the draft's continuation of `tokens`."""
    stepper.sync(tokens)
    options = stepper.start(tokens, len(tokens))
    found = []
    while options is not None:
        found.append([options.tokens, [round(p, 4) for p in options.probabilities]])
        if len(found) == DEPTH:
            break
        options = stepper.step(options.tokens[0])
    return found


@click.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--target", type=click.Path(exists=True, path_type=Path), default=EMBEDDED)
@click.option("--draft", type=click.Path(exists=True, path_type=Path), default=EMBEDDED.with_name("draft.gguf"))
@click.option("--tokens", default=128, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--prompts", type=click.Path(exists=True, path_type=Path), help="JSONL. [default: the shipped sets]")
@click.option("--per-category", default=3, show_default=True)
def main(
    out: Path, target: Path, draft: Path, tokens: int, temperature: float, prompts: Path | None, per_category: int
) -> None:
    options = LoadOptions(threads=1, context_size=CONTEXT)
    models: list[Model] = [
        open_model("llamacpp", p, options, progress=lambda f: None, check=lambda: None) for p in (target, draft)
    ]
    engine = Engine(models[0], None, Speculation("none", 0, 0))
    session = models[1].open_session(lambda: None)
    traces = []
    for prompt in take_per_category(read_prompts(prompts) if prompts else read_shipped_prompts(), per_category):
        if len(encode_prompt(models[0].tokenizer, prompt.turns[0], parse_special=True)) + tokens > CONTEXT:
            click.echo(f"{prompt.id} is left out: it does not fit into {CONTEXT} tokens", err=True)
            continue
        *_, finished = engine.stream(Request(prompt.turns[0], SamplingParams(temperature=temperature), tokens, seed=1))
        assert isinstance(finished, Finished)
        start = encode_prompt(models[0].tokenizer, prompt.turns[0], parse_special=True)
        text = [*start, *finished.tokens]
        stepper = DraftModelStepper(session, models[0].tokenizer.vocab_size, GreedyTopK())
        spines = [spine(stepper, text[:end]) for end in range(len(start) + 1, len(text))]
        traces.append(
            {"id": prompt.id, "category": prompt.category, "prompt": start, "text": finished.tokens, "spines": spines}
        )
        click.echo(f"{prompt.id}: {len(start)} + {len(finished.tokens)} tokens", err=True)
    with gzip.open(out, "wt", encoding="utf-8") as file:
        json.dump({"temperature": temperature, "traces": traces}, file)


if __name__ == "__main__":
    main()
