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
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from edgespec.memory.suffixes import SEPARATOR, WIDTH, SuffixIndex, join_texts, reverse, sort_positions
from edgespec.memory.texts import Kind, SpaceKey, StoredText

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
