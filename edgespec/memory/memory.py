"""The texts of one data folder as an engine uses them, and the thread that stores and indexes them."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from time import monotonic

from edgespec.errors import CacheError, reason_of
from edgespec.memory import rows
from edgespec.memory.database import Database
from edgespec.memory.space import Home, MemorySpace
from edgespec.memory.texts import SpaceKey
from edgespec.memory.upkeep import Interrupted, Upkeep

__all__ = ["Memory", "MemorySpace"]

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
