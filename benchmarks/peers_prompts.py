"""The prompts of `benchmarks.peers`: those that fit the context, made as long as the run asks for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.peers_arms import Prompt
from edgespec.bench.prompt_sets import BenchPrompt
from edgespec.engine.engine import Engine
from edgespec.errors import ContextOverflow


def select_prompts(
    engine: Engine, candidates: Sequence[BenchPrompt], tokens: int, context: int, length: int
) -> list[Prompt]:
    """Those that fit with `tokens` more, each extended to about `length` tokens.

    Raises click.ClickException where none fits.
    """
    prompts = []
    for prompt in candidates:
        text = prompt.turns[0]
        try:
            text = extend_prompt(engine, text, length)
            ids = engine.encode(text)
        except ContextOverflow:
            ids = []
        if ids and len(ids) + tokens < context:
            prompts.append(Prompt(prompt.id, prompt.category, text, ids))
        else:
            click.echo(f"{prompt.id} is left out: too long for a context of {context}.", err=True)
    if not prompts:
        raise click.ClickException("no prompt fits into the context: give a larger --ctx.")
    return prompts


def extend_prompt(engine: Engine, text: str, length: int) -> str:
    """`text` behind as much code of a module of the standard library as makes about `length` tokens."""
    missing = length - len(engine.encode(text))
    if missing <= 0:
        return text
    code = Path(argparse.__file__).read_text(encoding="utf-8")
    sample = code[: 2 * missing]  # characters; fewer tokens than `missing` in any vocabulary of words
    end = round(len(sample) * missing / len(engine.encode(sample)))
    return f"{code[:end].rpartition(chr(10))[0]}\n\n\n{text}"
