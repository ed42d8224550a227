"""The texts of one namespace, as the slots of an engine use them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from edgespec.errors import CacheError
from edgespec.memory import queries
from edgespec.memory.database import Database
from edgespec.memory.index import TextIndex
from edgespec.memory.segments import Matches, encode_end, find_longest
from edgespec.memory.texts import Origin, SpaceKey, StoredText, split_new

if TYPE_CHECKING:
    from edgespec.memory.memory import Memory


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

        None if its last token precedes no token of any text.
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
        forgotten, `epoch` the space's when the text was begun; None if that is now.
        """
        if epoch is not None and epoch != self.epoch:
            return  # texts were forgotten since, and this may be one of them
        name = None if source is None else queries.clean_source(source)
        origin = Origin(name, time.time(), self.epoch)
        self._added.append((list(text), n_prompt, origin))
        self._memory.wake.set()

    def table(self, name: str, open: Callable[[bytes | None], T]) -> T:
        """What a drafter has learned from these texts: one object for all slots, made by `open` from what was saved.

        It is saved in idle time. Once texts are forgotten, `open(None)` makes a new one, so ask for it again in
        each generation.
        """
        with self._lock:
            if name not in self._learned:
                saved = None
                if self._memory.database is not None:
                    try:
                        saved = queries.read_learned(self._memory.database, self.key, name)
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
            queries.add_texts(database, self.key, new)
        self.index.keep(lambda text: text.id >= 0)
        used, self.used = self.used, set()
        if used:
            queries.mark_used(database, used)
        if is_last or monotonic() > self._saved_s + _LEARNED_S:
            self._save_learned(database)
        return new

    def sync(self, database: Database, segments: Sequence[queries.SegmentRow]) -> bool:
        """Use these segments from now on; False if one is damaged or missing: it is removed, with the later ones.

        Raises CacheError.
        """
        with self._lock:
            damaged = self.index.sync(segments, database.folder)
        if damaged:
            queries.drop_segments(database, self.key, damaged[0].first)
        return not damaged

    def _save_learned(self, database: Database) -> None:
        self._saved_s = monotonic()
        epoch = self.epoch  # before what was learned is read: another thread may replace both
        for name, learned in list(self._learned.items()):
            queries.save_learned(database, self.key, name, learned.dump(), epoch)

    def _follow(self, database: Database) -> None:
        epoch = queries.read_epoch(database)
        is_new = epoch != self.epoch
        if is_new:
            self.index.keep(lambda text: not text.id)
            self._learned, self.used = {}, set()
        self.sync(database, queries.list_segments(database, self.key))
        if is_new:
            self.epoch = epoch
            self._known = queries.read_keys(database, self.key)
            self._load_latest(database)

    def _load_latest(self, database: Database) -> None:
        """Index the latest texts that have no segment."""
        total, first = 0, None
        unindexed = queries.list_unindexed(database, self.key)
        for id, n in reversed(unindexed):
            total += n
            if first is not None and total > _MAX_LOADED:
                break
            first = id
        if first is not None:
            texts = queries.read_texts(database, self.key, first, unindexed[-1][0])
            self.index.add([text for text in texts if not self.index.covers(text.id)])
