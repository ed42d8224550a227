"""The texts of one namespace, as the slots of an engine use them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from time import monotonic
from typing import Protocol, TypeVar

import numpy as np

from edgespec.errors import CacheError
from edgespec.memory import database as rows
from edgespec.memory.database import Database
from edgespec.memory.segments import Matches, Place, TextIndex, encode_end, find_longest
from edgespec.memory.texts import KnownBlocks, Origin, SpaceKey, StoredText, split_new

_USEFUL = 8  # tokens of a match that makes its text count as used
_MAX_LOADED = 2**17  # tokens of texts without a segment that are indexed when a space is opened
_LEARNED_S = 300.0  # between two times that what drafters have learned is saved


class Learned(Protocol):
    """What a drafter has learned from texts."""

    def dump(self) -> bytes: ...


T = TypeVar("T", bound=Learned)


class SpaceContext:
    """What the spaces of a memory share; its database is None where texts are kept in memory only."""

    def __init__(self, database: Database | None) -> None:
        self.database = database
        self.wake = threading.Event()  # tells the background thread that there is something to do
        self.notices: deque[str] = deque()  # sentences for the user
        self._has_failed = False

    def report(self, error: CacheError) -> None:
        """Tell the user, once, that the folder cannot be used; the memory goes on without it."""
        if not self._has_failed:
            self._has_failed = True
            self.notices.append(f"{error.message} Earlier texts are not stored. {error.hint}")


class MemorySpace:
    """The earlier texts of one tokenizer and namespace. Any thread may use it; no error of the disk gets out."""

    def __init__(self, key: SpaceKey, context: SpaceContext) -> None:
        self.key = key
        self.index = TextIndex(key)
        self.used: set[int] = set()  # ids of texts that were found, since these were last saved
        self.epoch = 0  # how many times texts had been forgotten when the space was last refreshed
        self._learned: dict[str, Learned] = {}
        self._saved: dict[str, tuple[int, bytes]] = {}  # epochs and hashes of what was learned
        self._saved_s = monotonic()
        self._context = context
        self._known = KnownBlocks()
        self._added: deque[tuple[Sequence[int], int, Origin]] = deque()  # texts without an index, with their prompts
        self._lock = threading.RLock()
        self._version = -1  # of the database
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

    def read(self, place: Place, n: int) -> list[int]:
        """Up to `n` tokens from `place`; they end with their text."""
        return place.read(n)

    def add(self, text: Sequence[int], n_prompt: int, source: str | None, epoch: int | None = None) -> None:
        """Keep a text, whose first `n_prompt` tokens are the prompt and the others the answer.

        It is found at once and stored in the background. `source` is the conversation or the like with which it is
        forgotten, `epoch` the space's when the text was begun; None where that is now.
        """
        name = None if source is None else rows.clean_source(source)
        origin = Origin(name, time.time(), self.epoch if epoch is None else epoch)
        self._added.append((list(text), n_prompt, origin))
        self._context.wake.set()

    def table(self, name: str, open: Callable[[bytes | None], T]) -> T:
        """What a drafter has learned from these texts: one object for all slots, made by `open` from what was saved.

        It is saved in idle time. After texts were forgotten it is another object, made by `open(None)`: ask for it in
        each generation.
        """
        with self._lock:
            if name not in self._learned:
                saved = None
                if self._context.database is not None:
                    try:
                        saved = rows.read_learned(self._context.database, self.key, name)
                    except CacheError as error:
                        self._context.report(error)
                self._learned[name] = open(saved)
            return self._learned[name]  # type: ignore[return-value]

    def refresh(self) -> None:
        """Index what was added, and notice what other processes have built and forgotten; for a generation's start."""
        self.index_added()
        database = self._context.database
        if database is None:
            return
        with self._lock:
            try:
                version = database.version()
                if version != self._version:
                    self._follow(database, is_first=self._version < 0)
                    self._version = version
            except CacheError as error:
                self._context.report(error)

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
        """Use these segments from now on; False where some are damaged or missing, which are removed then.

        Raises CacheError.
        """
        with self._lock:
            damaged = self.index.sync(segments, database.folder)
        if damaged:
            rows.drop_segments(database, damaged)
        return not damaged

    def _save_learned(self, database: Database) -> None:
        self._saved_s = monotonic()
        epoch = self.epoch  # before what was learned is read: another thread may replace both
        for name, learned in list(self._learned.items()):
            data = learned.dump()
            saved = epoch, blake2b(data).digest()
            if self._saved.get(name) != saved:
                rows.save_learned(database, self.key, name, data, epoch)
                self._saved[name] = saved

    def _follow(self, database: Database, *, is_first: bool) -> None:
        """Take over the state of the database."""
        epoch = rows.read_epoch(database)
        segments = rows.list_segments(database, self.key)
        is_new = is_first or epoch != self.epoch
        if is_new:
            self.index.keep(lambda text: not text.id)
            self._learned, self.used = {}, set()
        self.sync(database, segments)
        if is_new:
            self.epoch = epoch
            self._known = KnownBlocks(rows.read_keys(database, self.key))
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
