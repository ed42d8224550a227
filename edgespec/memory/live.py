"""The live tier: texts that are in no segment file yet, with indexes in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.memory.segments import Segment, build_segment
from edgespec.memory.texts import SpaceKey, StoredText

_SMALL = 2**11  # tokens of a run that further texts join, so that many short answers are a few runs
MAX_TOKENS = 2**21
"""Of the live tier; its oldest texts are not found where there are more."""


@dataclass(frozen=True, eq=False, slots=True)
class _Run:
    """Texts with one index."""

    texts: list[StoredText]
    segment: Segment


class LiveTexts:
    """Found as soon as they are added. Any thread may add; one at a time merges and drops."""

    def __init__(self, key: SpaceKey) -> None:
        self._key = key
        self._runs: tuple[_Run, ...] = ()  # replaced as a whole, so that readers need no lock
        self._lock = threading.Lock()

    @property
    def segments(self) -> list[Segment]:
        """The oldest first."""
        return [run.segment for run in self._runs]

    def texts(self) -> list[StoredText]:
        """The oldest first."""
        return [text for run in self._runs for text in run.texts]

    def add(self, texts: Sequence[StoredText]) -> None:
        with self._lock:
            runs, joined = [*self._runs], list(texts)
            if runs and runs[-1].segment.n_tokens < _SMALL:
                joined = runs.pop().texts + joined
            runs += self._index(joined)
            while len(runs) > 1 and sum(run.segment.n_tokens for run in runs) > MAX_TOKENS:
                del runs[0]
            self._runs = tuple(runs)

    def drop_stored(self) -> None:
        """Keep only texts that are not in the database yet."""
        with self._lock:
            self._runs = tuple(self._index([text for text in self.texts() if not text.id]))

    def merge(self) -> None:
        """Bring the indexes down to a few: each has more than twice as many tokens as the one after it."""
        i = len(self._runs) - 2
        while i >= 0:
            older, newer = self._runs[i : i + 2]
            if older.segment.n_tokens <= 2 * newer.segment.n_tokens:
                self._replace([older, newer], older.texts + newer.texts)
                i = len(self._runs) - 1
            i -= 1

    def keep(self, is_kept: Callable[[StoredText], bool]) -> None:
        """Drop the other texts."""
        for run in self._runs:
            kept = [text for text in run.texts if is_kept(text)]
            if len(kept) < len(run.texts):
                self._replace([run], kept)

    def _replace(self, runs: list[_Run], texts: list[StoredText]) -> None:
        """One index of `texts` in place of adjacent `runs`, if these are still there."""
        new = self._index(texts)
        with self._lock:
            for i in range(len(self._runs) - len(runs) + 1):
                if list(self._runs[i : i + len(runs)]) == runs:
                    self._runs = (*self._runs[:i], *new, *self._runs[i + len(runs) :])
                    return

    def _index(self, texts: list[StoredText]) -> list[_Run]:
        return [_Run(texts, Segment(build_segment(self._key, texts), is_live=True))] if texts else []
