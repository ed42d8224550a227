"""What the background thread of a memory does: store texts, build and merge segments, keep to the limit of bytes."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from time import monotonic

from edgespec.memory import rows
from edgespec.memory.cold import MAX_SEGMENT, QUICK_SEGMENT, plan_build
from edgespec.memory.database import Database
from edgespec.memory.removal import BYTES, age_out
from edgespec.memory.segments import build_segment
from edgespec.memory.space import MemorySpace
from edgespec.memory.texts import SpaceKey, StoredText

_LEARNED_S = 300.0  # between two times that what drafters have learned is saved
_UNCHECKED = 0.01  # of the limit that is stored before the texts are measured again


class Interrupted(Exception):
    """No index is to be built at present."""


class Upkeep:
    """The work on the spaces of one memory, all of it in one thread."""

    def __init__(self, database: Database | None, limit_bytes: int) -> None:
        """`database` is of this thread alone; None for memory only."""
        self._database = database
        self._limit_bytes = limit_bytes
        self._n_unchecked = limit_bytes  # bytes that were stored since the texts were measured
        self._saved: dict[tuple[SpaceKey, str], tuple[int, bytes]] = {}  # epochs and hashes of what was learned
        self._saved_s: dict[SpaceKey, float] = {}  # when that was
        self._is_tidy = False  # whether the leftovers of killed processes were removed

    def serve(self, space: MemorySpace, check: Callable[[], None], *, is_last: bool) -> None:
        """Store what is new in `space`; then, while `check` does not raise, bring its segments up to date.

        Raises CacheError, and what `check` raises. `is_last`: the memory is being closed.
        """
        space.index_added()
        try:
            if self._database is not None:
                self._store(self._database, space, is_last=is_last)
        finally:
            if not is_last:
                space.live.merge()
        if self._database is not None:
            check()
            _build(self._database, space, check, QUICK_SEGMENT if is_last else MAX_SEGMENT)

    def close(self) -> None:
        if self._database is not None:
            self._database.close()

    def _store(self, database: Database, space: MemorySpace, *, is_last: bool) -> None:
        """Write what is new in a space to the database."""
        if not self._is_tidy:
            database.remove_leftovers()
            self._is_tidy = True
        new = [text for text in space.live.texts() if not text.id]
        if new:
            rows.add_texts(database, space.key, new)
            space.live.keep(lambda text: text.id >= 0)
            self._n_unchecked += sum(BYTES * len(text.tokens) for text in new)
        used, space.used = space.used, set()
        if used:
            rows.mark_used(database, used)
        if is_last or monotonic() > self._saved_s.setdefault(space.key, monotonic()) + _LEARNED_S:
            self._save_learned(database, space)
        if new and self._n_unchecked > _UNCHECKED * self._limit_bytes:  # under load too, which may never end
            age_out(database, self._limit_bytes)
            self._n_unchecked = 0

    def _save_learned(self, database: Database, space: MemorySpace) -> None:
        self._saved_s[space.key] = monotonic()
        epoch = space.epoch  # before what was learned is read: another thread may replace both
        for name, learned in list(space.learned.items()):
            data = learned.dump()
            saved = epoch, blake2b(data).digest()
            if self._saved.get((space.key, name)) != saved:
                rows.save_learned(database, space.key, name, data, epoch)
                self._saved[space.key, name] = saved


def _build(database: Database, space: MemorySpace, check: Callable[[], None], limit: int) -> None:
    """Build and merge segments of a space, of `limit` tokens at most, until there is nothing left to do."""

    def is_uncovered(text: StoredText) -> bool:
        return not text.id or not space.cold.covers(text.id)

    while True:
        check()
        epoch = rows.read_epoch(database)
        segments = rows.list_segments(database, space.key)
        if damaged := space.sync(segments):
            rows.drop_segments(database, damaged)
            continue
        plan = plan_build(rows.list_unindexed(database, space.key), segments, limit)
        if plan is None:
            break
        texts = rows.read_texts(database, space.key, plan.first, plan.last)
        data = build_segment(space.key, texts, check)
        rows.add_segment(database, space.key, plan, data, epoch)
    space.live.keep(is_uncovered)
