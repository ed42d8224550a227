"""Segments: texts with an index of what precedes each position, as one block of bytes in a file or in memory.

A file holds, all in the machine's byte order but for the tokens:

header     _HEADER: magic and version, CRC-32 of what follows it, three counts
ids        [texts] int64, rows of the database
starts     [texts] uint32, the position of the first token of each
answers    [texts] uint32, the position where its answer starts, or _CORPUS
order      [positions] uint32, see `sort_positions`; without those after which nothing follows
tokens     [tokens] uint32, the last one first, big-endian, so that their bytes compare as they do
"""

from __future__ import annotations

import mmap
import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.cancel import check_cancelled
from edgespec.memory.texts import MAX_MATCH, SEPARATOR, Kind, StoredText, Tokens

_HEADER = struct.Struct("=8sIIII")
_MAGIC = b"edgemem2"
_CORPUS = 0xFFFF_FFFF
_N_SORTED = 256  # up to so many places of a match, all of them are sorted to find the latest
_WIDTH = 4  # bytes of a token and of a position
_HALF = np.uint64(32)  # bits
_N_SPREAD = 64  # places that are looked at if there are more: every one would be a cache miss


class DamagedSegment(Exception):
    """A file that is not a segment."""


def join_texts(texts: Sequence[Tokens]) -> Tokens:
    """[n] texts with SEPARATOR around each."""
    joined = np.full(sum(map(len, texts)) + len(texts) + 1, SEPARATOR, np.uint32)
    start = 1
    for text in texts:
        joined[start : start + len(text)] = text
        start += len(text) + 1
    return joined


def sort_positions(tokens: Tokens) -> Tokens:
    """[n] the positions of `tokens`, ordered by the MAX_MATCH tokens before each, the nearest first.

    Positions with equal tokens before them are in rising order. Prefix doubling over the reversed text (Manber and
    Myers 1990), in which only the positions that are still tied are sorted again (Larsson and Sadakane 1999).
    Raises Cancelled.
    """
    n = len(tokens)
    padded = np.zeros(n + 2, np.uint64)
    padded[2:] = tokens
    keys = padded[1:-1] << _HALF | padded[:-2]  # of the two tokens before each position
    length = 2
    # ranks[MAX_MATCH + i] of position i: the place of the first one that is tied with it. Below every position: -1.
    ranks = np.full(n + MAX_MATCH, -1, np.int32)
    ranks[MAX_MATCH:] = 0
    tied = np.arange(MAX_MATCH, n + MAX_MATCH, dtype=np.int32)
    while True:
        check_cancelled()
        order = np.argsort(keys, kind="stable")
        tied, keys = tied[order], keys[order]
        firsts, before = _find_firsts(keys), ranks[tied]
        ranks[tied] = before + firsts - _find_firsts(before)
        is_alone = firsts == np.arange(len(tied))
        is_alone[:-1] &= is_alone[1:]
        tied = tied[~is_alone]
        if length == MAX_MATCH or not len(tied):
            return np.argsort(ranks[MAX_MATCH:], kind="stable").astype(np.uint32)
        keys = ranks[tied].astype(np.uint64) << _HALF | (ranks[tied - length] + 1).astype(np.uint64)
        length *= 2


def _find_firsts(ordered: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """[n] the place of the first value that equals each."""
    is_first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    return np.maximum.accumulate(np.where(is_first, np.arange(len(ordered), dtype=np.int32), 0))


def encode_end(text: Sequence[int]) -> bytes:
    """The last MAX_MATCH tokens of `text` as `Segment.longest` takes them: the nearest first, big-endian."""
    end = text[-MAX_MATCH:]
    return struct.pack(f">{len(end)}I", *reversed(end))


def build_segment(texts: Sequence[StoredText]) -> bytes:
    """The segment of `texts`; later ones count as more recent."""
    tokens = join_texts([text.tokens for text in texts])
    lengths = np.array([len(text.tokens) for text in texts], np.int64)
    starts = np.cumsum(lengths + 1) - lengths
    is_found = tokens != SEPARATOR
    for text, start in zip(texts, starts.tolist(), strict=True):
        is_found[start : start + max(1, text.n_lead)] = False  # what precedes a text's first token is no match
    order = sort_positions(tokens)
    order = order[is_found[order]]
    answers = [
        _CORPUS if text.origin.is_corpus else start + text.answer for text, start in zip(texts, starts, strict=True)
    ]
    body = b"".join(
        (
            np.array([text.id for text in texts], np.int64).tobytes(),
            starts.astype(np.uint32).tobytes(),
            np.array(answers, np.uint32).tobytes(),
            order.tobytes(),
            tokens[::-1].astype(">u4").tobytes(),
        )
    )
    return _HEADER.pack(_MAGIC, zlib.crc32(body), len(texts), len(order), len(tokens)) + body


class Segment:
    """The texts of one segment; any thread may read it.

    The end of a text is found in O(log n) comparisons of MAX_MATCH tokens.
    """

    def __init__(self, data: bytes | mmap.mmap, texts: Sequence[StoredText] | None = None) -> None:
        """`data` is of `build_segment`; `texts` are its texts if these are in no file yet."""
        *_, n_texts, n_positions, n_tokens = _HEADER.unpack_from(data)
        self.texts = texts
        self.n_tokens = n_tokens
        self._data = data
        view, starts = memoryview(data), _HEADER.size + 8 * n_texts
        answers, order = starts + _WIDTH * n_texts, starts + 2 * _WIDTH * n_texts
        self._first = order + _WIDTH * n_positions  # byte of the tokens
        # Not numpy's arrays: single values of these are read, in every round.
        self.ids = view[_HEADER.size : starts].cast("q")
        self._starts = view[starts:answers].cast("I")
        self.answers = view[answers:order].cast("I")
        self.order = view[order : self._first].cast("I")

    def longest(self, end: bytes) -> int:
        """The number of tokens of the longest match of `end`, which is of `encode_end`."""
        place = self._bisect(end)
        return max((self._count_common(i, end) for i in (place - 1, place) if 0 <= i < len(self.order)), default=0)

    def find_recent(self, end: bytes, limit: int) -> list[int]:
        """Up to `limit` positions that follow all of `end`, the latest first.

        Of very many positions, the latest are those of a sample that is spread over all contexts of the match.
        """
        above = (int.from_bytes(end) + 1).to_bytes(len(end))  # tokens are below SEPARATOR: this cannot overflow
        low = self._bisect(end)
        n = self._bisect(above, low) - low
        step = 1 if n <= _N_SORTED else n // _N_SPREAD
        positions = self.order[low : low + n : step].tolist()
        positions.sort(reverse=True)
        return positions[:limit]

    def read(self, position: int, n: int) -> list[int]:
        """Up to `n` tokens from `position`; they end with their text."""
        stop = self._first + (self.n_tokens - position) * _WIDTH
        data = self._data[max(self._first, stop - n * _WIDTH) : stop]
        read: list[int] = [*struct.unpack(f">{len(data) // _WIDTH}I", data)]
        read.reverse()
        return read[: read.index(SEPARATOR)] if SEPARATOR in read else read

    def find_text(self, position: int) -> int:
        """The number of the text in which `position` lies."""
        return bisect_right(self._starts, position) - 1

    def _bisect(self, end: bytes, low: int = 0) -> int:
        """How many places come before those that `end` precedes; `low` at least."""
        data, base, n_bytes = self._data, self._first + self.n_tokens * _WIDTH, len(end)

        def before(position: int) -> bytes:
            start = base - position * _WIDTH
            return data[start : start + n_bytes]

        return bisect_left(self.order, end, low, key=before)

    def _count_common(self, i: int, end: bytes) -> int:
        """The number of tokens at the end of `end` that precede the position at place `i`."""
        start = self._first + (self.n_tokens - self.order[i]) * _WIDTH
        known = self._data[start : start + len(end)]
        n = min(len(known), len(end))
        differing = int.from_bytes(known[:n]) ^ int.from_bytes(end[:n])
        return (n - (differing.bit_length() + 7) // 8) // _WIDTH


def open_segment(path: Path) -> Segment:
    """Map a file. Raises DamagedSegment, OSError."""
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:  # an empty file
            raise DamagedSegment(str(error)) from error
    if len(data) < _HEADER.size:
        raise DamagedSegment("it has no header")
    magic, checksum, n_texts, n_positions, n_tokens = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise DamagedSegment("it is of another version")
    if len(data) != _HEADER.size + 16 * n_texts + _WIDTH * (n_positions + n_tokens):
        raise DamagedSegment("its size is wrong")
    with memoryview(data) as view, view[_HEADER.size :] as body:
        if zlib.crc32(body) != checksum:
            raise DamagedSegment("its checksum is wrong")
    return Segment(data)


@dataclass(frozen=True, slots=True)
class Place:
    """A position in earlier texts at which they go on after a match."""

    segment: Segment
    position: int

    @property
    def kind(self) -> Kind:
        """Tells whether the next token is of a model's answer, of a prompt or of a document."""
        answer = self.segment.answers[self.segment.find_text(self.position)]
        if answer == _CORPUS:
            return "corpus"
        return "answer" if self.position >= answer else "prompt"

    @property
    def text_id(self) -> int:
        """The text's row in the database; 0 if it was not stored when it was indexed."""
        return self.segment.ids[self.segment.find_text(self.position)]

    def read(self, n: int) -> list[int]:
        """Up to `n` tokens from here; they end with their text."""
        return self.segment.read(self.position, n)

    @property
    def is_live(self) -> bool:
        """Tells whether the text is in no segment file yet. Most such texts are of the present session."""
        return self.segment.texts is not None


@dataclass(frozen=True, slots=True)
class Matches:
    """Earlier occurrences of a text's end.

    length  tokens of the longest match, at most MAX_MATCH
    places  up to the limit that was asked for, the most recent first
    """

    length: int
    places: list[Place]


def find_longest(segments: Sequence[Segment], end: bytes, limit: int) -> Matches | None:
    """The longest match of `end`, which is of `encode_end`, in segments whose most recent one is the last.

    None if its last token precedes no token in any of them.
    """
    lengths = [segment.longest(end) for segment in segments]
    length = max(lengths, default=0)
    if not length:
        return None
    places: list[Place] = []
    for segment, own in zip(reversed(segments), reversed(lengths), strict=True):
        if own == length and len(places) < limit:
            positions = segment.find_recent(end[: length * _WIDTH], limit - len(places))
            places += [Place(segment, position) for position in positions]
    return Matches(length, places)
