"""Segments: texts with an index of what precedes each position, as one block of bytes in a file or in memory.

A file holds, all in the machine's byte order but for the tokens:

header     _HEADER: magic and version, CRC-32 of what follows it, hashes of tokenizer and namespace, three counts
times      [texts] float64, seconds since the epoch
ids        [texts] int64, rows of the database
starts     [texts] uint32, the position of the first token of each
answers    [texts] uint32, the position where its answer starts, or _CORPUS
order      [positions] uint32, see `sort_positions`; without those after which nothing follows
tokens     [tokens] uint32, see `reverse`
"""

from __future__ import annotations

import mmap
import struct
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from edgespec.memory.database import BuildPlan, SegmentRow
from edgespec.memory.texts import (
    SEPARATOR,
    WIDTH,
    Kind,
    SpaceKey,
    StoredText,
    SuffixIndex,
    join_texts,
    reverse,
    sort_positions,
)

_HEADER = struct.Struct("=8sI16s16s4xIII4x")
_MAGIC = b"edgemem1"
_CORPUS = 0xFFFF_FFFF
_N_SORTED = 256  # places of a match that are all looked at for the latest ones
_N_SPREAD = 64  # places that are looked at where there are more: every one would be a cache miss


class DamagedSegment(Exception):
    """A file that is not a segment of the texts that were asked for."""


def build_segment(key: SpaceKey, texts: Sequence[StoredText], check: Callable[[], None] = lambda: None) -> bytes:
    """The segment of `texts`; later ones count as more recent. `check` is called now and then, and may raise."""
    tokens = join_texts([text.tokens for text in texts])
    lengths = np.array([len(text.tokens) for text in texts], np.int64)
    starts = np.cumsum(lengths + 1) - lengths
    is_found = tokens != SEPARATOR
    for text, start in zip(texts, starts.tolist(), strict=True):
        is_found[start : start + max(1, text.n_lead)] = False  # what precedes a text's first token is no match
    order = sort_positions(tokens, check)
    order = order[is_found[order]]
    answers = [
        _CORPUS if text.origin.is_corpus else start + text.answer for text, start in zip(texts, starts, strict=True)
    ]
    body = b"".join(
        (
            np.array([text.origin.time for text in texts], np.float64).tobytes(),
            np.array([text.id for text in texts], np.int64).tobytes(),
            starts.astype(np.uint32).tobytes(),
            np.array(answers, np.uint32).tobytes(),
            order.tobytes(),
            reverse(tokens),
        )
    )
    counts = (len(texts), len(order), len(tokens))
    return _HEADER.pack(_MAGIC, zlib.crc32(body), *_digests(key), *counts) + body


class Segment:
    """The texts of one segment; any thread may read it."""

    def __init__(self, data: bytes | mmap.mmap, *, is_live: bool) -> None:
        """`data` is of `build_segment`. `is_live`: it is of texts that are not in a segment file yet."""
        *_, n_texts, n_positions, n_tokens = _HEADER.unpack_from(data)
        self.is_live = is_live
        self.n_tokens = n_tokens
        start = _HEADER.size
        self.times = np.frombuffer(data, np.float64, n_texts, start)
        self.ids = np.frombuffer(data, np.int64, n_texts, start + 8 * n_texts)
        self._starts = np.frombuffer(data, np.uint32, n_texts, start + 16 * n_texts)
        self._answers = np.frombuffer(data, np.uint32, n_texts, start + 20 * n_texts)
        order = start + 24 * n_texts
        self.order = memoryview(data)[order : order + WIDTH * n_positions].cast("I")
        self.index = SuffixIndex(data, order + WIDTH * n_positions, n_tokens, self.order)

    def find_recent(self, end: bytes, limit: int) -> tuple[int, list[int]]:
        """How many positions follow all of `end`, and up to `limit` of them, the latest first.

        Of very many positions, the latest are those of a sample that is spread over all contexts of the match.
        """
        places = self.index.find(end)
        step = 1 if len(places) <= _N_SORTED else len(places) // _N_SPREAD
        positions = self.order[places.start : places.stop : step].tolist()
        positions.sort(reverse=True)
        return len(places), positions[:limit]

    def find_text(self, position: int) -> int:
        """The number of the text in which `position` lies."""
        return int(np.searchsorted(self._starts, position, "right")) - 1

    def kind(self, position: int) -> Kind:
        answer = self._answers[self.find_text(position)]
        if answer == _CORPUS:
            return "corpus"
        return "answer" if position >= answer else "prompt"


def open_segment(path: Path, key: SpaceKey) -> Segment:
    """Map a file. Raises DamagedSegment for one that is damaged or of other texts; OSError."""
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:  # an empty file
            raise DamagedSegment(str(error)) from error
    if len(data) < _HEADER.size:
        raise DamagedSegment("it has no header")
    magic, checksum, *digests, n_texts, n_positions, n_tokens = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise DamagedSegment("it is of another version")
    if len(data) != _HEADER.size + 24 * n_texts + WIDTH * (n_positions + n_tokens):
        raise DamagedSegment("its size is wrong")
    if tuple(digests) != _digests(key):
        raise DamagedSegment("it is of other texts")
    with memoryview(data) as view, view[_HEADER.size :] as body:
        if zlib.crc32(body) != checksum:
            raise DamagedSegment("its checksum is wrong")
    return Segment(data, is_live=False)


@dataclass(frozen=True, slots=True)
class Place:
    """Where earlier texts go on after a match."""

    segment: Segment
    position: int

    @property
    def kind(self) -> Kind:
        """Whether the next token is of a model's answer, of a prompt or of a document."""
        return self.segment.kind(self.position)

    @property
    def text_id(self) -> int:
        """The text's row in the database; 0 where it was not stored when it was indexed."""
        return int(self.segment.ids[self.segment.find_text(self.position)])

    def read(self, n: int) -> list[int]:
        """Up to `n` tokens from here; they end with their text."""
        return self.segment.index.read(self.position, n)

    @property
    def is_live(self) -> bool:
        """Whether the text is in no segment file yet. Most such texts are of the present session."""
        return self.segment.is_live

    @property
    def time(self) -> float:
        """When the text was stored, in seconds since the epoch."""
        return float(self.segment.times[self.segment.find_text(self.position)])


@dataclass(frozen=True, slots=True)
class Matches:
    """Earlier occurrences of a text's end.

    length  tokens of the longest match, at most MAX_MATCH
    n       the number of places with a match of this length
    places  up to the limit that was asked for, the most recent first
    """

    length: int
    n: int
    places: list[Place]


def find_longest(segments: Sequence[Segment], end: bytes, limit: int) -> Matches | None:
    """The longest match of `end`, which is of `encode_end`, in segments whose most recent one is the last.

    None where its last token precedes no token in any of them.
    """
    lengths = [segment.index.longest(end) for segment in segments]
    length = max(lengths, default=0)
    if not length:
        return None
    n, places = 0, list[Place]()
    for segment, own in zip(reversed(segments), reversed(lengths), strict=True):
        if own == length:
            more, positions = segment.find_recent(end[: length * WIDTH], limit - len(places))
            n += more
            places += [Place(segment, position) for position in positions]
    return Matches(length, n, places)


def _digests(key: SpaceKey) -> tuple[bytes, bytes]:
    """Hashes of tokenizer and namespace."""
    first, second = (blake2b(each.encode(), digest_size=16).digest() for each in (key.tokenizer, key.namespace))
    return first, second


# The cold tier: segment files, and which of them to build or merge next.


MIN_BUILD = 2**14
"""Tokens of new texts that make a segment; fewer stay in the live tier."""
MAX_SEGMENT = 2**22
"""Tokens: sorting so many takes 250 MB for some seconds."""
QUICK_SEGMENT = 2**19
"""Tokens: sorting so many takes a fraction of a second."""
_RATIO = 4  # a segment has more than so many times the tokens of the next one, so that there are few


class ColdTexts:
    """The open segments of a space. Any thread may read; one at a time synchronizes."""

    def __init__(self, key: SpaceKey) -> None:
        self._key = key
        self._open: dict[SegmentRow, Segment] = {}  # replaced as a whole, so that readers need no lock

    @property
    def segments(self) -> list[Segment]:
        """The oldest first."""
        return list(self._open.values())

    def sync(self, rows: Sequence[SegmentRow], folder: Path) -> list[SegmentRow]:
        """Open those of `rows` that are not open and forget the others; returns those that are damaged or missing."""
        opened = {row: self._open[row] for row in rows if row in self._open}
        damaged = []
        for row in rows:
            if row not in opened:
                try:
                    opened[row] = open_segment(folder / row.name, self._key)
                except (DamagedSegment, FileNotFoundError):
                    damaged.append(row)
                except OSError:
                    continue  # such as too many open files: it may be whole, and another file would not open either
        self._open = {row: opened[row] for row in rows if row in opened}
        return damaged

    def covers(self, id: int) -> bool:
        """Whether a segment has the text `id`."""
        return any(row.first <= id <= row.last for row in self._open)


def plan_build(
    unindexed: Sequence[tuple[int, int]], rows: Sequence[SegmentRow], limit: int = MAX_SEGMENT
) -> BuildPlan | None:
    """The next segment to build, of `limit` tokens at most if no text is longer; None where nothing is to do.

    `unindexed` are the (id, tokens) of the texts in no segment and `rows` the segments, both by id. The texts between
    two segments, and those after the last one if they have MIN_BUILD tokens, make a segment together with those
    neighbours that are not much larger.
    """
    starts = [row.first for row in rows]
    gaps: dict[int, list[tuple[int, int]]] = {}  # number of segments before -> texts
    for id, n in unindexed:
        gaps.setdefault(bisect_right(starts, id), []).append((id, n))
    for n_before, texts in gaps.items():
        if n_before < len(rows) or sum(n for _, n in texts) >= MIN_BUILD:
            n_after = next((n for n in gaps if n > n_before), len(rows))  # rows up to the next gap
            return _extend(texts, rows[:n_before], rows[n_before:n_after], limit)
    return None


def _extend(
    texts: Sequence[tuple[int, int]], before: Sequence[SegmentRow], after: Sequence[SegmentRow], limit: int
) -> BuildPlan:
    """A segment of `texts`, or of the first of them, and of neighbours."""
    first = last = texts[0][0]
    total = 0
    for id, n in texts:
        if total and total + n > limit:
            after = ()
            break
        last, total = id, total + n
    replaced: list[SegmentRow] = []
    for neighbours in (before[::-1], after):
        for row in neighbours:
            if row.n_tokens > min(_RATIO * total, limit - total):
                break
            replaced.append(row)
            total += row.n_tokens
    first, last = min([first, *(row.first for row in replaced)]), max([last, *(row.last for row in replaced)])
    return BuildPlan(first, last, total, tuple(replaced))


# The live tier: texts that are in no segment file yet, with indexes in memory.


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
