"""The cold tier: segment files, and which of them to build or merge next."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from edgespec.memory.rows import BuildPlan, SegmentRow
from edgespec.memory.segments import DamagedSegment, Segment, open_segment
from edgespec.memory.texts import SpaceKey

MIN_BUILD = 2**14
"""Tokens of new texts that make a segment; fewer stay in the live tier."""
MAX_SEGMENT = 2**22
"""Tokens: sorting so many takes 250 MB for some seconds."""
QUICK_SEGMENT = 2**19
"""Tokens: sorting so many takes a fraction of a second."""
_RATIO = 4  # a segment has more than so many times the tokens of the next one, so that there are few


class ColdTexts:
    """The open segments of a space. Any thread may read; one at a time synchronizes."""

    def __init__(self, key: SpaceKey) -> None:
        self._key = key
        self._open: dict[SegmentRow, Segment] = {}  # replaced as a whole, so that readers need no lock

    @property
    def segments(self) -> list[Segment]:
        """The oldest first."""
        return list(self._open.values())

    def sync(self, rows: Sequence[SegmentRow], folder: Path) -> list[SegmentRow]:
        """Open those of `rows` that are not open and forget the others; returns those that are damaged or missing."""
        opened = {row: self._open[row] for row in rows if row in self._open}
        damaged = []
        for row in rows:
            if row not in opened:
                try:
                    opened[row] = open_segment(folder / row.name, self._key)
                except (DamagedSegment, FileNotFoundError):
                    damaged.append(row)
                except OSError:
                    continue  # such as too many open files: it may be whole, and another file would not open either
        self._open = {row: opened[row] for row in rows if row in opened}
        return damaged

    def covers(self, id: int) -> bool:
        """Whether a segment has the text `id`."""
        return any(row.first <= id <= row.last for row in self._open)


def plan_build(
    unindexed: Sequence[tuple[int, int]], rows: Sequence[SegmentRow], limit: int = MAX_SEGMENT
) -> BuildPlan | None:
    """The next segment to build, of `limit` tokens at most if no text is longer; None where nothing is to do.

    `unindexed` are the (id, tokens) of the texts in no segment and `rows` the segments, both by id. The texts between
    two segments, and those after the last one if they have MIN_BUILD tokens, make a segment together with those
    neighbours that are not much larger.
    """
    starts = [row.first for row in rows]
    gaps: dict[int, list[tuple[int, int]]] = {}  # number of segments before -> texts
    for id, n in unindexed:
        gaps.setdefault(bisect_right(starts, id), []).append((id, n))
    for n_before, texts in gaps.items():
        if n_before < len(rows) or sum(n for _, n in texts) >= MIN_BUILD:
            n_after = next((n for n in gaps if n > n_before), len(rows))  # rows up to the next gap
            return _extend(texts, rows[:n_before], rows[n_before:n_after], limit)
    return None


def _extend(
    texts: Sequence[tuple[int, int]], before: Sequence[SegmentRow], after: Sequence[SegmentRow], limit: int
) -> BuildPlan:
    """A segment of `texts`, or of the first of them, and of neighbours."""
    first = last = texts[0][0]
    total = 0
    for id, n in texts:
        if total and total + n > limit:
            after = ()
            break
        last, total = id, total + n
    replaced: list[SegmentRow] = []
    for neighbours in (before[::-1], after):
        for row in neighbours:
            if row.n_tokens > min(_RATIO * total, limit - total):
                break
            replaced.append(row)
            total += row.n_tokens
    first, last = min([first, *(row.first for row in replaced)]), max([last, *(row.last for row in replaced)])
    return BuildPlan(first, last, total, tuple(replaced))
