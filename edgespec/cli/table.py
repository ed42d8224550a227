"""Tables on a terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence


def format_table(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> Iterator[str]:
    """The rows in aligned columns, those of `right` to the right; on a terminal the last column ends at its width."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    room = shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None
    for row in rows:
        cells = [
            each.rjust(width) if i in right else each.ljust(width)
            for i, (each, width) in enumerate(zip(row, widths, strict=True))
        ]
        line = "  ".join(cells).rstrip()
        yield line if room is None else shorten(line, room)


def shorten(text: str, width: int) -> str:
    """`text` in at most `width` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"
