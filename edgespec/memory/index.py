"""The segments of a namespace: which to build or merge next."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

from edgespec.cancel import cancellable
from edgespec.memory.queries import BuildPlan, SegmentRow
from edgespec.memory.segments import DamagedSegment, Segment, build_segment, open_segment
from edgespec.memory.texts import StoredText

MIN_BUILD = 2**14
"""Tokens of new texts that make a segment file; fewer stay in memory."""

MAX_SEGMENT = 2**22
"""Tokens: sorting so many takes 250 MB for some seconds."""

QUICK_SEGMENT = 2**19
"""Tokens: sorting so many takes a fraction of a second."""

_RATIO = 4  # a segment has more than so many times the tokens of the next one, so that there are few


def plan_build(
    unindexed: Sequence[tuple[int, int]], rows: Sequence[SegmentRow], limit: int = MAX_SEGMENT
) -> BuildPlan | None:
    """The next segment to build, of `limit` tokens at most if no text is longer; None if nothing is to do.

    `unindexed` are the (id, tokens) of the texts in no segment and `rows` the segments, both by id. The first such
    texts make a segment, together with the last segments if these are not much larger.
    """
    sums = list(accumulate(n for _, n in unindexed))
    if not sums or sums[-1] < MIN_BUILD:
        return None
    n_taken = max(1, bisect_right(sums, limit))
    total, replaced = sums[n_taken - 1], list[SegmentRow]()
    for row in reversed(rows):
        if row.n_tokens > min(_RATIO * total, limit - total):
            break
        replaced.append(row)
        total += row.n_tokens
    first = replaced[-1].first if replaced else unindexed[0][0]
    return BuildPlan(first, unindexed[n_taken - 1][0], total, tuple(replaced))


MAX_LIVE = 2**21
"""Tokens of texts in no file; the oldest of them are not found if there are more."""

_SMALL = 2**11  # tokens of an index that further texts always join
_MAX_JOINED = 2**16  # tokens of the largest index that others join: a generation waits while they are sorted


class TextIndex:
    """The segments of a space: those of files, and those of texts that are in no file yet. Any thread may use it."""

    def __init__(self) -> None:
        self._files: dict[SegmentRow, Segment] = {}  # this and `live` are replaced as a whole: readers need no lock
        self.live: tuple[Segment, ...] = ()  # of texts in no file, the oldest first
        self._lock = threading.Lock()

    @property
    def files(self) -> list[Segment]:
        """The segments of files, the oldest first."""
        return list(self._files.values())

    @property
    def segments(self) -> list[Segment]:
        """All segments, the oldest first."""
        return [*self.files, *self.live]

    def texts(self) -> list[StoredText]:
        """The texts that are in no file, the oldest first."""
        return [text for segment in self.live for text in segment.texts or ()]

    def add(self, texts: list[StoredText]) -> None:
        """Have `texts` found from now on. Indexes are joined, so that many short texts have a few."""
        with self._lock:
            live = [*self.live, *self._index(texts)]
            while len(live) > 1 and live[-2].n_tokens <= min(max(_SMALL, _RATIO * live[-1].n_tokens), _MAX_JOINED):
                newer, older = live.pop(), live.pop()
                live += self._index([*(older.texts or ()), *(newer.texts or ())])
            while len(live) > 1 and sum(segment.n_tokens for segment in live) > MAX_LIVE:
                del live[0]
            self.live = tuple(live)

    def keep(self, is_kept: Callable[[StoredText], bool]) -> None:
        """Drop the texts in no file for which `is_kept` is false."""
        with self._lock:
            kept: list[Segment] = []
            for segment in self.live:
                all_texts = segment.texts or ()
                texts = list(filter(is_kept, all_texts))
                kept += [segment] if len(texts) == len(all_texts) else self._index(texts)
            self.live = tuple(kept)

    def sync(self, rows: Sequence[SegmentRow], folder: Path) -> list[SegmentRow]:
        """Open those of `rows` that are not open and forget the others; returns those that are damaged or missing.

        One thread at a time synchronizes.
        """
        opened: dict[SegmentRow, Segment] = {}
        damaged = []
        for row in rows:
            try:
                opened[row] = self._files.get(row) or open_segment(folder / row.name)
            except (DamagedSegment, FileNotFoundError):
                damaged.append(row)
            except OSError:
                continue  # such as too many open files: it may be whole, and another file would not open either
        self._files = opened
        return damaged

    def covers(self, id: int) -> bool:
        """Tells whether a file has the text `id`."""
        return any(row.first <= id <= row.last for row in self._files)

    def _index(self, texts: list[StoredText]) -> list[Segment]:
        with cancellable(lambda: None):  # it is short, and a cancelled answer's texts are kept too
            return [Segment(build_segment(texts), texts)] if texts else []
