"""`edgespec adapt data export`: saved chats for programs that train heads from nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.completers import complete_model
from edgespec.units import count

if TYPE_CHECKING:
    from edgespec.conversations import Store

# Commands of the programs' own documents, as of 2026-11: MODEL is the repository of the original weights.
_NEXT = """\
A head from nothing needs the original weights, a large GPU and tens of thousands of answers, so edgespec trains none.
SpecForge (EAGLE-3, in its repository):
  torchrun --standalone --nproc_per_node 1 scripts/train_eagle3.py --target-model-path MODEL --train-data-path {file} \\
    --output-dir head --num-epochs 10 --batch-size 1 --learning-rate 1e-4 --max-length 4096 --chat-template NAME
speculators (EAGLE-3 through vLLM, in its repository):
  python scripts/data_generation_offline.py --target-model-path MODEL --train-data-path {file} --output-dir states
Then: edgespec chat MODEL --draft eagle3:head"""


@click.command("export")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--model", "-m", metavar="NAME", shell_complete=complete_model, help="Only chats with this model.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def export_command(file: Path, model: str | None, force: bool) -> None:
    """Write saved chats to FILE as JSON lines, for SpecForge and speculators; prints their commands.

    Each line has the messages of one chat, on its current branch. Only its user can read FILE.
    """
    from edgespec.conversations import Store
    from edgespec.errors import CacheError, InvalidRequest, reason_of
    from edgespec.files import write_private

    if file.exists() and not force:
        raise InvalidRequest(f"{file} exists.", hint="Name another file, or use --force.")
    with closing(Store.open()) as store:
        lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in list_chats(store, model)]
    if not lines:
        of = "" if model is None else f" with {model}"
        raise InvalidRequest(f"there is no saved chat{of} with an answer.", hint="`edgespec history` lists them.")
    try:
        write_private(file, "".join(lines))
    except OSError as error:
        hint = "Free some space, or name a file in a folder that can be written."
        raise CacheError(f"{file} cannot be written: {reason_of(error)}.", hint=hint) from error
    click.echo(f"wrote {count(len(lines), 'chat')} to {file}")
    click.echo(_NEXT.format(file=file), err=True)


def list_chats(store: Store, model: str | None) -> Iterator[dict[str, Any]]:
    """The saved chats that have an answer, each with its messages up to the last answer."""
    for chat in store.recent(limit=-1):  # -1: all, as SQLite has it
        turns = [turn for turn in store.path(chat.leaf) if turn.text.strip()]
        while turns and turns[-1].role != "assistant":
            turns.pop()
        if turns and model in (None, chat.model):
            messages = [{"role": turn.role, "content": turn.text} for turn in turns]
            system = [{"role": "system", "content": chat.system}] if chat.system else []
            yield {"id": f"chat:{chat.id}", "conversations": [*system, *messages]}
