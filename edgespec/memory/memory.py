"""The texts of one data folder as an engine uses them, and the thread that stores and indexes them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from time import monotonic
from typing import Protocol, TypeVar

import numpy as np

from edgespec.errors import CacheError, Cancelled
from edgespec.memory import database as rows
from edgespec.memory.database import Database
from edgespec.memory.segments import (
    MAX_SEGMENT,
    QUICK_SEGMENT,
    Matches,
    TextIndex,
    build_segment,
    encode_end,
    find_longest,
    plan_build,
)
from edgespec.memory.store import BYTES, age_out
from edgespec.memory.texts import Origin, SpaceKey, StoredText, split_new

_UNCHECKED = 0.01  # of the limit that is stored before the texts are measured again
_CLOSING_S = 0.5  # for indexes, so that programs that are never idle have them too
_PAUSE_S = 1.0  # before texts are stored, so that those of many short answers are stored together


class Memory:
    """Earlier texts of one tokenizer, shared by all slots of an engine and, by its folder, by other processes.

    Where the folder cannot be used, texts are kept in memory only, and `take_notice` says so.
    """

    def __init__(self, folder: Path, tokenizer: str, limit_bytes: int) -> None:
        """`tokenizer` identifies it: texts of another one are not found.

        Where the folder would have more than `limit_bytes`, the texts that were of no use for longest are removed.
        """
        self.database: Database | None = None  # where texts are kept in memory only
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
            self._notices.append(f"{error.message} Earlier texts are not stored. {error.hint}")

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
            epoch = rows.read_epoch(database)
            segments = rows.list_segments(database, space.key)
            if not space.sync(database, segments):
                continue
            plan = plan_build(rows.list_unindexed(database, space.key), segments, limit)
            if plan is None:
                break
            texts = rows.read_texts(database, space.key, plan.first, plan.last)
            data = build_segment(texts, self._check)
            rows.add_segment(database, space.key, plan, data, epoch)
        space.index.keep(is_uncovered)

    def _check(self) -> None:
        """Raises Cancelled where no index may be built."""
        if monotonic() >= self._build_until_s:
            raise Cancelled


# The texts of one namespace, as the slots of an engine use them.


_USEFUL = 8  # tokens of a match that makes its text count as used
_MAX_LOADED = 2**17  # tokens of texts without a segment that are indexed when a space is opened
_LEARNED_S = 300.0  # between two times that what drafters have learned is saved


class Learned(Protocol):
    """What a drafter has learned from texts."""

    def dump(self) -> bytes: ...


T = TypeVar("T", bound=Learned)


class MemorySpace:
    """The earlier texts of one tokenizer and namespace. Any thread may use it; no error of the disk gets out."""

    def __init__(self, key: SpaceKey, memory: Memory) -> None:
        self.key = key
        self.index = TextIndex()
        self.used: set[int] = set()  # ids of texts that were found, since these were last saved
        self.epoch = -1  # how many times texts had been forgotten when the space was last refreshed
        self._learned: dict[str, Learned] = {}
        self._saved_s = monotonic()
        self._memory = memory
        self._known: set[int] = set()  # keys of the blocks that are stored
        self._added: deque[tuple[Sequence[int], int, Origin]] = deque()  # texts without an index, with their prompts
        self._lock = threading.RLock()
        self.refresh()

    @property
    def has_texts(self) -> bool:
        return bool(self._added or self.index.segments)

    @property
    def n_tokens(self) -> int:
        """About how many tokens can be found; what was added last may not be counted yet."""
        return sum(segment.n_tokens for segment in self.index.segments)

    def find(self, text: Sequence[int], limit: int) -> Matches | None:
        """The longest match of the end of `text`, of MAX_MATCH tokens at most, and up to `limit` places, 1 or more.

        None where its last token precedes no token of any text.
        """
        if self._added:
            self.index_added()
        matches = find_longest(self.index.segments, encode_end(text), limit)
        if matches is not None and matches.length >= _USEFUL and (id := matches.places[0].text_id):
            self.used.add(id)
        return matches

    def add(self, text: Sequence[int], n_prompt: int, source: str | None, epoch: int | None = None) -> None:
        """Keep a text, whose first `n_prompt` tokens are the prompt and the others the answer.

        It is found at once and stored in the background. `source` is the conversation or the like with which it is
        forgotten, `epoch` the space's when the text was begun; None where that is now.
        """
        if epoch is not None and epoch != self.epoch:
            return  # texts were forgotten since, and this may be one of them
        name = None if source is None else rows.clean_source(source)
        origin = Origin(name, time.time(), self.epoch)
        self._added.append((list(text), n_prompt, origin))
        self._memory.wake.set()

    def table(self, name: str, open: Callable[[bytes | None], T]) -> T:
        """What a drafter has learned from these texts: one object for all slots, made by `open` from what was saved.

        It is saved in idle time. After texts were forgotten it is another object, made by `open(None)`: ask for it in
        each generation.
        """
        with self._lock:
            if name not in self._learned:
                saved = None
                if self._memory.database is not None:
                    try:
                        saved = rows.read_learned(self._memory.database, self.key, name)
                    except CacheError as error:
                        self._memory.report(error)
                self._learned[name] = open(saved)
            return self._learned[name]  # type: ignore[return-value]

    def refresh(self) -> None:
        """Index what was added, and notice what other processes have built and forgotten; for a generation's start."""
        self.index_added()
        if self._memory.database is not None:
            with self._lock:
                try:
                    self._follow(self._memory.database)
                except CacheError as error:
                    self._memory.report(error)

    def index_added(self) -> None:
        """Let the texts that were added be found."""
        with self._lock:
            while self._added:
                text, n_prompt, origin = self._added[0]  # until it is indexed, so that `find` waits for it
                self.index.add(split_new(np.array(text, np.uint32), n_prompt, self._known, origin))
                self._added.popleft()

    def store(self, database: Database, *, is_last: bool) -> list[StoredText]:
        """Write what is new to `database`, and what was learned now and then; returns the new texts.

        Raises CacheError. `is_last`: the memory is being closed.
        """
        new = [text for text in self.index.texts() if not text.id]
        if new:
            rows.add_texts(database, self.key, new)
        self.index.keep(lambda text: text.id >= 0)
        used, self.used = self.used, set()
        if used:
            rows.mark_used(database, used)
        if is_last or monotonic() > self._saved_s + _LEARNED_S:
            self._save_learned(database)
        return new

    def sync(self, database: Database, segments: Sequence[rows.SegmentRow]) -> bool:
        """Use these segments from now on; False where one is damaged or missing: it is removed, with the later ones.

        Raises CacheError.
        """
        with self._lock:
            damaged = self.index.sync(segments, database.folder)
        if damaged:
            rows.drop_segments(database, self.key, damaged[0].first)
        return not damaged

    def _save_learned(self, database: Database) -> None:
        self._saved_s = monotonic()
        epoch = self.epoch  # before what was learned is read: another thread may replace both
        for name, learned in list(self._learned.items()):
            rows.save_learned(database, self.key, name, learned.dump(), epoch)

    def _follow(self, database: Database) -> None:
        epoch = rows.read_epoch(database)
        is_new = epoch != self.epoch
        if is_new:
            self.index.keep(lambda text: not text.id)
            self._learned, self.used = {}, set()
        self.sync(database, rows.list_segments(database, self.key))
        if is_new:
            self.epoch = epoch
            self._known = rows.read_keys(database, self.key)
            self._load_latest(database)

    def _load_latest(self, database: Database) -> None:
        """Index the latest texts that have no segment."""
        total, first = 0, None
        unindexed = rows.list_unindexed(database, self.key)
        for id, n in reversed(unindexed):
            total += n
            if first is not None and total > _MAX_LOADED:
                break
            first = id
        if first is not None:
            texts = rows.read_texts(database, self.key, first, unindexed[-1][0])
            self.index.add([text for text in texts if not self.index.covers(text.id)])
