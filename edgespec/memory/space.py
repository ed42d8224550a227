"""The texts of one namespace, as the slots of an engine use them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from edgespec.errors import CacheError
from edgespec.memory import database as rows
from edgespec.memory.database import Database
from edgespec.memory.segments import ColdTexts, LiveTexts, Matches, Place, find_longest
from edgespec.memory.texts import KnownBlocks, Origin, SpaceKey, encode_end, split_new

_USEFUL = 8  # tokens of a match that makes its text count as used
_MAX_LOADED = 2**17  # tokens of texts without a segment that are indexed when a space is opened


class Learned(Protocol):
    """What a drafter has learned from texts."""

    def dump(self) -> bytes: ...


T = TypeVar("T", bound=Learned)


@dataclass(frozen=True, slots=True)
class Home:
    """Where spaces are kept.

    database  None for memory only
    wake      tells the background thread that there is something to do
    report    takes an error of the database that a call has met; the memory goes on without it
    """

    database: Database | None
    wake: Callable[[], None]
    report: Callable[[CacheError], None]


@dataclass(frozen=True, slots=True)
class _Added:
    """A text that has no index yet."""

    text: Sequence[int]
    n_prompt: int
    origin: Origin


class MemorySpace:
    """The earlier texts of one tokenizer and namespace. Any thread may use it; no error of the disk gets out."""

    def __init__(self, key: SpaceKey, home: Home) -> None:
        self.key = key
        self.live = LiveTexts(key)
        self.cold = ColdTexts(key)
        self.used: set[int] = set()  # ids of texts that were found, since these were last saved
        self.epoch = 0  # how many times texts had been forgotten when the space was last refreshed
        self.learned: dict[str, Learned] = {}
        self._home = home
        self._known = KnownBlocks()
        self._added: deque[_Added] = deque()
        self._lock = threading.RLock()
        self._version = -1  # of the database
        self.refresh()

    @property
    def has_texts(self) -> bool:
        return bool(self._added or self.cold.segments or self.live.segments)

    @property
    def n_tokens(self) -> int:
        """About how many tokens can be found; what was added last may not be counted yet."""
        return sum(segment.n_tokens for segment in [*self.cold.segments, *self.live.segments])

    def find(self, text: Sequence[int], limit: int) -> Matches | None:
        """The longest match of the end of `text`, of MAX_MATCH tokens at most, and up to `limit` places, 1 or more.

        None where its last token precedes no token of any text.
        """
        if self._added:
            self.index_added()
        matches = find_longest([*self.cold.segments, *self.live.segments], encode_end(text), limit)
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
        self._added.append(_Added(list(text), n_prompt, origin))
        self._home.wake()

    def table(self, name: str, open: Callable[[bytes | None], T]) -> T:
        """What a drafter has learned from these texts: one object for all slots, made by `open` from what was saved.

        It is saved in idle time. After texts were forgotten it is another object, made by `open(None)`: ask for it in
        each generation.
        """
        with self._lock:
            if name not in self.learned:
                saved = None
                if self._home.database is not None:
                    try:
                        saved = rows.read_learned(self._home.database, self.key, name)
                    except CacheError as error:
                        self._home.report(error)
                self.learned[name] = open(saved)
            return self.learned[name]  # type: ignore[return-value]

    def refresh(self) -> None:
        """Index what was added, and notice what other processes have built and forgotten; for a generation's start."""
        self.index_added()
        database = self._home.database
        if database is None:
            return
        with self._lock:
            try:
                version = database.version()
                if version != self._version:
                    self._follow(database, is_first=self._version < 0)
                    self._version = version
            except CacheError as error:
                self._home.report(error)

    def index_added(self) -> None:
        """Let the texts that were added be found."""
        with self._lock:
            while self._added:
                new = self._added[0]  # until it is indexed, so that `find` waits for it
                tokens = np.array(new.text, np.uint32)
                self.live.add(split_new(tokens, new.n_prompt, self._known, new.origin))
                self._added.popleft()

    def sync(self, segments: Sequence[rows.SegmentRow]) -> list[rows.SegmentRow]:
        """Use these segments from now on; returns those that are damaged or missing."""
        database = self._home.database
        with self._lock:
            return self.cold.sync(segments, database.folder) if database is not None else []

    def _follow(self, database: Database, *, is_first: bool) -> None:
        """Take over the state of the database."""
        epoch = rows.read_epoch(database)
        segments = rows.list_segments(database, self.key)
        is_new = is_first or epoch != self.epoch
        if is_new:
            self.live.drop_stored()
            self.learned, self.used = {}, set()
        if damaged := self.sync(segments):
            rows.drop_segments(database, damaged)
        if is_new:
            self.epoch = epoch
            self._known = KnownBlocks(rows.read_keys(database, self.key))
            self._load_live(database)

    def _load_live(self, database: Database) -> None:
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
            self.live.add([text for text in texts if not self.cold.covers(text.id)])
