"""Results, as tables or as JSON."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TextIO

import click

from edgespec.errors import CacheError, InvalidRequest, reason_of
from edgespec.files import replace_file


def print_result(facts: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print `facts` as JSON if that is wanted, else `lines`, which are read only then."""
    for line in [json.dumps(facts, ensure_ascii=False)] if as_json else lines:
        click.echo(line)


def format_table(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> Iterator[str]:
    """The rows in aligned columns; those with an index in `right` are aligned to the right. On a terminal, lines are
    cut at its width.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    room = shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None
    for row in rows:
        cells = [
            each.rjust(width) if i in right else each.ljust(width)
            for i, (each, width) in enumerate(zip(row, widths, strict=True))
        ]
        line = "  ".join(cells).rstrip()
        yield line if room is None else shorten(line, room)


def format_groups(
    rows: Sequence[Sequence[str]], groups: Sequence[str], titles: Mapping[str, str], right: frozenset[int]
) -> Iterator[str]:
    """`format_table` with a title above the first row of each group. `groups` has the group of each row."""
    shown = groups[0]
    for line, group in zip(format_table(rows, right), groups, strict=True):
        if group != shown:
            yield titles[group]
        shown = group
        yield line


def format_time(seconds: float) -> str:
    """A time since 1970 as a local date and time."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def require_new(file: Path, *, force: bool) -> None:
    """Raise InvalidRequest for a file that exists, unless `force`."""
    if file.exists() and not force:
        raise InvalidRequest(f"'{file}' exists.", hint="Name another one, or use --force.")


@contextmanager
def open_output(file: Path, *, force: bool) -> Iterator[TextIO]:
    """Open a text file that only its user can read, and that replaces `file` once the block has ended without an error.

    '-' is stdout. Raises InvalidRequest for a file that exists, unless `force`, and CacheError.
    """
    if str(file) == "-":
        yield sys.stdout
        return
    require_new(file, force=force)
    try:
        with replace_file(file, 0o600) as partial, partial.open("w", encoding="utf-8") as out:
            yield out
    except OSError as error:
        hint = "Free some space, or name a folder that can be written."
        raise CacheError(f"'{file}' cannot be written: {reason_of(error)}.", hint=hint) from error


def write_lines(file: Path, facts: Iterable[object], *, force: bool) -> int:
    """Write each of `facts` as a line of JSON; returns their number. Raises what `open_output` raises."""
    n = 0
    with open_output(file, force=force) as out:
        for n, each in enumerate(facts, 1):  # noqa: B007 - the number of the last one
            out.write(json.dumps(each, ensure_ascii=False) + "\n")
    return n
