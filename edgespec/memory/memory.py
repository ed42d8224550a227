"""The texts of one data folder as an engine uses them: the thread that stores and indexes them."""

from __future__ import annotations

import threading
from collections import deque
from math import inf
from pathlib import Path
from time import monotonic

from edgespec.cancel import cancellable
from edgespec.errors import CacheError, Cancelled
from edgespec.memory import queries
from edgespec.memory.database import Database
from edgespec.memory.index import MAX_SEGMENT, QUICK_SEGMENT, plan_build
from edgespec.memory.removal import BYTES, age_out
from edgespec.memory.segments import build_segment
from edgespec.memory.space import MemorySpace
from edgespec.memory.texts import SpaceKey, StoredText

_UNCHECKED = 0.01  # of the limit that is stored before the texts are measured again
_CLOSING_S = 0.5  # for indexes, so that programs that are never idle have them too
_PAUSE_S = 1.0  # before texts are stored, so that those of many short answers are stored together


class Memory:
    """Earlier texts of one tokenizer, shared by all slots of an engine and, by its folder, by other processes.

    If the folder cannot be used, texts are kept in memory only, and `take_notice` says so.
    """

    def __init__(self, folder: Path, tokenizer: str, limit_bytes: int) -> None:
        """Texts stored under another `tokenizer` id are not found.

        If the folder would exceed `limit_bytes`, the texts that have gone unused the longest are removed.
        """
        self.database: Database | None = None  # if texts are kept in memory only
        self.wake = threading.Event()  # tells the background thread that there is something to do
        self._tokenizer = tokenizer
        self._limit_bytes = self._n_unchecked = limit_bytes  # bytes that were stored since the texts were measured
        self._spaces: dict[str, MemorySpace] = {}
        # When to stop building: at once while the engine works, never while it is idle, soon after it is closed.
        self._build_until_s = 0.0
        self._hurry = threading.Event()
        self._waiting: deque[threading.Event] = deque()
        self._notices: deque[str] = deque()
        self._has_failed = False
        try:
            self.database = Database.open(folder)
            self.database.remove_leftovers()
        except CacheError as error:
            self.report(error)
        if self.database is not None and self.database.notice:
            self._notices.append(self.database.notice)
        self._thread = threading.Thread(target=self._run, name="edgespec-memory", daemon=True)
        self._thread.start()

    def space(self, namespace: str) -> MemorySpace:
        """The texts of a namespace, always the same object: "" for the user's own, or the name of a server's key."""
        if namespace not in self._spaces:
            self._spaces.setdefault(namespace, MemorySpace(SpaceKey(self._tokenizer, namespace), self))
        return self._spaces[namespace]

    def name_model(self, name: str) -> None:
        """Tell commands of a model with this tokenizer, by the name that its user knows."""
        if self.database is not None:
            try:
                self.database.name_tokenizer(self._tokenizer, name)
            except CacheError as error:
                self.report(error)

    def set_idle(self, is_idle: bool) -> None:
        """Tells whether the engine has nothing to do: only then are indexes built and merged, in the background."""
        self._build_until_s = inf if is_idle else 0.0
        if is_idle:
            self.wake.set()

    def flush(self) -> None:
        """Wait until all texts are stored and, while idle, have segments."""
        done = threading.Event()
        self._waiting.append(done)
        self._hurry.set()
        self.wake.set()
        while not done.wait(0.1) and self._thread.is_alive():
            pass

    def take_notice(self) -> str | None:
        """A sentence for the user, each once: the folder cannot be used, or was damaged."""
        return self._notices.popleft() if self._notices else None

    def report(self, error: CacheError) -> None:
        """Tell the user, once, that the folder cannot be used; the memory goes on without it."""
        if not self._has_failed:
            self._has_failed = True
            self._notices.append(f"{error.message} Earlier texts are not stored. {error.hint}".rstrip())

    def close(self) -> None:
        """Store what was added, build indexes for a moment, and stop the thread. Spaces are not used after it."""
        self._build_until_s = monotonic() + _CLOSING_S
        self._hurry.set()
        self.wake.set()
        self._thread.join()
        if self.database is not None:
            self.database.close()

    def _run(self) -> None:
        writer: Database | None = None  # a connection of its own, whose transactions no answer waits for
        if self.database is not None:
            try:
                writer = self.database.connect_again()
            except CacheError as error:
                self.report(error)
        self._work(writer)
        if writer is not None:
            writer.close()

    def _work(self, writer: Database | None) -> None:
        """Store and index what is added, until the memory is closed."""
        is_last = False
        while not is_last:
            self.wake.wait()
            self._hurry.wait(_PAUSE_S)
            self._hurry.clear()
            self.wake.clear()
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            is_last = 0.0 < self._build_until_s < inf
            for space in list(self._spaces.values()):
                try:
                    space.index_added()
                    if writer is not None:
                        self._serve(writer, space, is_last=is_last)
                except CacheError as error:
                    self.report(error)
                except (Cancelled, MemoryError):
                    pass  # the rest is done when the engine is idle the next time
            for done in waiting:
                done.set()

    def _serve(self, database: Database, space: MemorySpace, *, is_last: bool) -> None:
        """Store what is new in `space`; then, while that is allowed, bring its segments up to date.

        Raises CacheError, Cancelled.
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
            epoch = queries.read_epoch(database)
            segments = queries.list_segments(database, space.key)
            if not space.sync(database, segments):
                continue
            plan = plan_build(queries.list_unindexed(database, space.key), segments, limit)
            if plan is None:
                break
            texts = queries.read_texts(database, space.key, plan.first, plan.last)
            with cancellable(self._check):
                data = build_segment(texts)
            queries.add_segment(database, space.key, plan, data, epoch)
        space.index.keep(is_uncovered)

    def _check(self) -> None:
        """Raises Cancelled if no index may be built."""
        if monotonic() >= self._build_until_s:
            raise Cancelled
