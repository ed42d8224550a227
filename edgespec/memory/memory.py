"""The texts of one data folder as an engine uses them, and the thread that stores and indexes them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from time import monotonic

from edgespec.errors import CacheError, reason_of
from edgespec.memory import database as rows
from edgespec.memory.database import Database
from edgespec.memory.segments import MAX_SEGMENT, QUICK_SEGMENT, build_segment, plan_build
from edgespec.memory.space import Home, MemorySpace
from edgespec.memory.store import BYTES, age_out
from edgespec.memory.texts import SpaceKey, StoredText

__all__ = ["Memory", "MemorySpace"]


# What the background thread of a memory does: store texts, build and merge segments, keep to the limit of bytes.


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


_CLOSING_S = 0.5  # for indexes, so that programs that are never idle have them too
_PAUSE_S = 1.0  # before texts are stored, so that those of many short answers are stored together


class _Notices:
    """Sentences for the user that were not taken yet."""

    def __init__(self) -> None:
        self._texts: deque[str] = deque()
        self._has_failed = False

    def add(self, text: str) -> None:
        self._texts.append(text)

    def report(self, error: CacheError) -> None:
        """Tell the user, once, that the folder cannot be used."""
        if not self._has_failed:
            self._has_failed = True
            self.add(f"{error.message} Earlier texts are not stored. {error.hint}")

    def take(self) -> str | None:
        return self._texts.popleft() if self._texts else None


class Memory:
    """Earlier texts of one tokenizer, shared by all slots of an engine and, by its folder, by other processes.

    Where the folder cannot be used, texts are kept in memory only, and `take_notice` says so.
    """

    def __init__(self, folder: Path, tokenizer: str, limit_bytes: int) -> None:
        """`tokenizer` identifies it: texts of another one are not found.

        Where the folder would have more than `limit_bytes`, the texts that were of no use for longest are removed.
        """
        self._tokenizer = tokenizer
        self._spaces: dict[str, MemorySpace] = {}
        self._lock = threading.Lock()
        self._notices = _Notices()
        self._is_idle = False
        self._stop_s: float | None = None  # once it is being closed: when to stop building
        self._wake, self._hurry = threading.Event(), threading.Event()
        self._waiting: deque[threading.Event] = deque()
        upkeep = Upkeep(None, limit_bytes)
        database = None
        try:
            database = Database.open(folder)
            upkeep = Upkeep(database.reopen(), limit_bytes)
            if database.notice:
                self._notices.add(database.notice)
        except CacheError as error:
            self._notices.report(error)
        self._home = Home(database, self._wake.set, self._notices.report)
        self._upkeep = upkeep
        self._thread = threading.Thread(target=self._run, name="edgespec-memory", daemon=True)
        self._thread.start()

    def space(self, namespace: str) -> MemorySpace:
        """The texts of a namespace, always the same object: "" for the user's own, or the name of a server's key."""
        with self._lock:
            if namespace not in self._spaces:
                self._spaces[namespace] = MemorySpace(SpaceKey(self._tokenizer, namespace), self._home)
            return self._spaces[namespace]

    def name_model(self, name: str) -> None:
        """Tell commands of a model with this tokenizer, by the name that its user knows."""
        if self._home.database is not None:
            try:
                rows.name_tokenizer(self._home.database, self._tokenizer, name)
            except CacheError as error:
                self._notices.report(error)

    def set_idle(self, is_idle: bool) -> None:
        """Whether the engine has nothing to do: only then are indexes built and merged, in the background."""
        self._is_idle = is_idle
        if is_idle:
            self._wake.set()

    def flush(self) -> None:
        """Wait until all texts are stored and, while idle, have segments."""
        done = threading.Event()
        self._waiting.append(done)
        self._hurry.set()
        self._wake.set()
        while not done.wait(0.1) and self._thread.is_alive():
            pass

    def take_notice(self) -> str | None:
        """A sentence for the user, each once: the folder cannot be used, or was damaged."""
        return self._notices.take()

    def close(self) -> None:
        """Store what was added, build indexes for a moment, and stop the thread. Spaces are not used after it."""
        self._stop_s = monotonic() + _CLOSING_S
        self._hurry.set()
        self._wake.set()
        self._thread.join()
        self._upkeep.close()
        if self._home.database is not None:
            self._home.database.close()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._hurry.wait(_PAUSE_S)
            self._hurry.clear()
            self._wake.clear()
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            is_last = self._stop_s is not None
            with self._lock:
                spaces = list(self._spaces.values())
            for space in spaces:
                try:
                    self._upkeep.serve(space, self._check, is_last=is_last)
                except CacheError as error:
                    self._notices.report(error)
                except (Interrupted, MemoryError):
                    pass  # the rest is done when the engine is idle the next time
                except Exception as error:  # noqa: BLE001 - other spaces are served
                    self._notices.report(CacheError(f"{reason_of(error)}.", hint="Please report this."))
            for done in waiting:
                done.set()
            if is_last:
                return

    def _check(self) -> None:
        """Raises Interrupted where no index may be built."""
        may_build = self._is_idle if self._stop_s is None else monotonic() < self._stop_s
        if not may_build:
            raise Interrupted
