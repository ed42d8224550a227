"""The texts of one data folder as an engine uses them, and the thread that stores and indexes them."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from time import monotonic

from edgespec.errors import CacheError, reason_of
from edgespec.memory import database as rows
from edgespec.memory.database import Database
from edgespec.memory.segments import MAX_SEGMENT, QUICK_SEGMENT, build_segment, plan_build
from edgespec.memory.space import MemorySpace, SpaceContext
from edgespec.memory.store import BYTES, age_out
from edgespec.memory.texts import SpaceKey, StoredText

__all__ = ["Memory", "MemorySpace"]

_UNCHECKED = 0.01  # of the limit that is stored before the texts are measured again
_CLOSING_S = 0.5  # for indexes, so that programs that are never idle have them too
_PAUSE_S = 1.0  # before texts are stored, so that those of many short answers are stored together


class Interrupted(Exception):
    """No index is to be built at present."""


class Memory:
    """Earlier texts of one tokenizer, shared by all slots of an engine and, by its folder, by other processes.

    Where the folder cannot be used, texts are kept in memory only, and `take_notice` says so.
    """

    def __init__(self, folder: Path, tokenizer: str, limit_bytes: int) -> None:
        """`tokenizer` identifies it: texts of another one are not found.

        Where the folder would have more than `limit_bytes`, the texts that were of no use for longest are removed.
        """
        self._tokenizer = tokenizer
        self._limit_bytes = self._n_unchecked = limit_bytes  # bytes that were stored since the texts were measured
        self._spaces: dict[str, MemorySpace] = {}
        self._lock = threading.Lock()
        self._is_idle = False
        self._stop_s: float | None = None  # once it is being closed: when to stop building
        self._hurry = threading.Event()
        self._waiting: deque[threading.Event] = deque()
        self._writer: Database | None = None  # of the thread alone
        self._context = SpaceContext(None)
        try:
            self._context.database = Database.open(folder)
            self._writer = self._context.database.reopen()
            if self._context.database.notice:
                self._context.notices.append(self._context.database.notice)
        except CacheError as error:
            self._context.report(error)
        self._thread = threading.Thread(target=self._run, name="edgespec-memory", daemon=True)
        self._thread.start()

    def space(self, namespace: str) -> MemorySpace:
        """The texts of a namespace, always the same object: "" for the user's own, or the name of a server's key."""
        with self._lock:
            if namespace not in self._spaces:
                self._spaces[namespace] = MemorySpace(SpaceKey(self._tokenizer, namespace), self._context)
            return self._spaces[namespace]

    def name_model(self, name: str) -> None:
        """Tell commands of a model with this tokenizer, by the name that its user knows."""
        if self._context.database is not None:
            try:
                rows.name_tokenizer(self._context.database, self._tokenizer, name)
            except CacheError as error:
                self._context.report(error)

    def set_idle(self, is_idle: bool) -> None:
        """Tells whether the engine has nothing to do: only then are indexes built and merged, in the background."""
        self._is_idle = is_idle
        if is_idle:
            self._context.wake.set()

    def flush(self) -> None:
        """Wait until all texts are stored and, while idle, have segments."""
        done = threading.Event()
        self._waiting.append(done)
        self._hurry.set()
        self._context.wake.set()
        while not done.wait(0.1) and self._thread.is_alive():
            pass

    def take_notice(self) -> str | None:
        """A sentence for the user, each once: the folder cannot be used, or was damaged."""
        return self._context.notices.popleft() if self._context.notices else None

    def close(self) -> None:
        """Store what was added, build indexes for a moment, and stop the thread. Spaces are not used after it."""
        self._stop_s = monotonic() + _CLOSING_S
        self._hurry.set()
        self._context.wake.set()
        self._thread.join()
        for database in (self._writer, self._context.database):
            if database is not None:
                database.close()

    def _run(self) -> None:
        is_last = is_tidy = False
        while not is_last:
            self._context.wake.wait()
            self._hurry.wait(_PAUSE_S)
            self._hurry.clear()
            self._context.wake.clear()
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            is_last = self._stop_s is not None
            with self._lock:
                spaces = list(self._spaces.values())
            for space in spaces:
                try:
                    space.index_added()
                    if self._writer is None:
                        space.index.keep(lambda text: True)
                        continue
                    if not is_tidy:
                        self._writer.remove_leftovers()
                        is_tidy = True
                    self._serve(self._writer, space, is_last=is_last)
                except CacheError as error:
                    self._context.report(error)
                except (Interrupted, MemoryError):
                    pass  # the rest is done when the engine is idle the next time
                except Exception as error:  # noqa: BLE001 - other spaces are served
                    self._context.report(CacheError(f"{reason_of(error)}.", hint="Please report this."))
            for done in waiting:
                done.set()

    def _serve(self, database: Database, space: MemorySpace, *, is_last: bool) -> None:
        """Store what is new in `space`; then, while that is allowed, bring its segments up to date.

        Raises CacheError, Interrupted.
        """
        new = space.store(database, is_last=is_last)
        self._n_unchecked += sum(BYTES * len(text.tokens) for text in new)
        if new and self._n_unchecked > _UNCHECKED * self._limit_bytes:  # under load too, which may never end
            age_out(database, self._limit_bytes)
            self._n_unchecked = 0
        self._build(database, space, QUICK_SEGMENT if is_last else MAX_SEGMENT)

    def _build(self, database: Database, space: MemorySpace, limit: int) -> None:
        """Build and merge segments of a space, of `limit` tokens at most, until there is nothing left to do."""

        def is_uncovered(text: StoredText) -> bool:
            return not text.id or not space.index.covers(text.id)

        while True:
            self._check()
            epoch = rows.read_epoch(database)
            segments = rows.list_segments(database, space.key)
            if not space.sync(database, segments):
                continue
            plan = plan_build(rows.list_unindexed(database, space.key), segments, limit)
            if plan is None:
                break
            texts = rows.read_texts(database, space.key, plan.first, plan.last)
            data = build_segment(space.key, texts, self._check)
            rows.add_segment(database, space.key, plan, data, epoch)
        space.index.keep(is_uncovered)

    def _check(self) -> None:
        """Raises Interrupted where no index may be built."""
        may_build = self._is_idle if self._stop_s is None else monotonic() < self._stop_s
        if not may_build:
            raise Interrupted
