"""The prompts of `benchmarks.peers`: those that fit the context, as long as the run asks for; turns of an agent."""

from __future__ import annotations

import argparse
import numbers
import re
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.peers_arms import Prompt
from edgespec.bench.prompt_sets import CATEGORIES, BenchPrompt, read_shipped_prompts, take_per_category
from edgespec.engine.engine import Engine
from edgespec.errors import ContextOverflow

AGENT_TURNS = "agent_turns"  # a category
N_TURNS = 5
N_LINES, N_EDITED = 300, 100  # of the file, and at its end, where the edits are
REQUEST = '\n\n\ndef read_options(path):\n    """Read'


def read_candidates(categories: Sequence[str]) -> list[BenchPrompt]:
    """The shipped prompts of `categories`, by default of all, and the turns of an agent. Raises InvalidRequest."""
    shipped = [name for name in categories if name != AGENT_TURNS] or ([] if categories else list(CATEGORIES))
    turns = make_agent_turns() if not categories or AGENT_TURNS in categories else []
    return [*(read_shipped_prompts(shipped) if shipped else []), *turns]


def make_agent_turns() -> list[BenchPrompt]:
    """A file of the standard library in which each turn has renamed one more method, and a function to be written."""
    lines = Path(numbers.__file__).read_text(encoding="utf-8").splitlines()[-N_LINES:]
    kept, edited = "\n".join(lines[:-N_EDITED]), "\n".join(lines[-N_EDITED:])
    turns = []
    for n, name in enumerate(re.findall(r"\bdef (\w+)", edited)[:N_TURNS]):
        edited = re.sub(rf"\b{name}\b", f"new{name}", edited)
        turns.append(BenchPrompt(f"{AGENT_TURNS}-{n + 1}", AGENT_TURNS, (f"{kept}\n{edited}{REQUEST}",)))
    return turns


def take_candidates(candidates: Sequence[BenchPrompt], limit: int) -> list[BenchPrompt]:
    """The first `limit` prompts of each category, and all turns of an agent."""
    turns = [prompt for prompt in candidates if prompt.category == AGENT_TURNS]
    return [*take_per_category([prompt for prompt in candidates if prompt not in turns], limit), *turns]


def split_warm(prompts: Sequence[Prompt], n: int) -> tuple[list[Prompt], list[Prompt]]:
    """The first `n` prompts of each category, and the others."""
    seen: dict[str, int] = {}
    earlier: list[Prompt] = []
    others: list[Prompt] = []
    for prompt in prompts:
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        (earlier if seen[prompt.category] <= n else others).append(prompt)
    return earlier, others


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
