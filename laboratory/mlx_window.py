"""A sliding-window model beyond its window: edgespec's and mlx_lm's speculative output against plain decoding.

    uv run python -m laboratory.mlx_window [--tokens 96] [--models 5]

Random-weight gemma3 pairs with a window of 24 tokens (tests/mlx_models.py), greedy. mlx_lm asks once, before it starts,
whether the caches can be trimmed. Reported: the first token at which each leaves mlx_lm's own plain output.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import mlx.core as mx

from benchmarks.machine import describe
from edgespec.backends.mlx.library import load_mlx
from edgespec.backends.mlx.model import load
from edgespec.backends.options import LoadOptions
from edgespec.core.sampling import SamplingParams
from edgespec.engine.drafting import Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.text.chat_template import encode_prompt
from tests.engine.prompts import CODE
from tests.mlx_models import CONFIGS, make_folder


@click.command()
@click.option("--tokens", default=96, show_default=True)
@click.option("--models", default=5, show_default=True)
def main(tokens: int, models: int) -> None:
    load_mlx()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(models):
            paths = [make_folder(Path(folder) / str(s), CONFIGS["sliding-window"], seed=s) for s in (seed, seed + 100)]
            rows.append(compare(paths, tokens))
            click.echo(rows[-1], err=True)
    click.echo(json.dumps({"benchmark": "mlx_window", "tokens": tokens, "first_difference": rows, **describe()}))


def compare(paths: Sequence[Path], tokens: int) -> dict[str, int | None]:
    from mlx_lm.generate import generate_step, speculative_generate_step
    from mlx_lm.utils import load_model

    opened = [load(path, LoadOptions(context_size=512)) for path in paths]
    engine = Engine(opened[0], opened[1], Speculation("model", 3, 3))
    *_, finished = engine.stream(Request(CODE[3], SamplingParams(temperature=0), tokens))
    assert isinstance(finished, Finished)
    prompt = mx.array(encode_prompt(opened[0].tokenizer, CODE[3], parse_special=True))
    target, draft = (load_model(path)[0] for path in paths)
    plain = [int(token) for token, _ in generate_step(prompt, target, max_tokens=tokens)]
    steps = speculative_generate_step(prompt, target, draft, num_draft_tokens=3, max_tokens=tokens)
    theirs = [int(token) for token, _, _ in steps]
    return {"prompt": prompt.size, "edgespec": fork(plain, finished.tokens), "mlx_lm": fork(plain, theirs)}


def fork(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position at which they differ, None where one begins with the other."""
    return next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)


if __name__ == "__main__":
    main()
