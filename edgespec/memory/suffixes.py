"""Positions of a text in the order of what precedes them, so that one binary search finds the longest match.

Tokens are uint32, and SEPARATOR stands before each text and after the last one. A match never reaches beyond it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from mmap import mmap
from sys import byteorder
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]

SEPARATOR = 0xFFFF_FFFF
MAX_MATCH = 32
"""Tokens: positions are ordered by so many of the tokens before them, and longer matches count as this long."""
WIDTH = 4  # bytes of a token and of a position
_HALF = np.uint64(32)  # bits


def join_texts(texts: Sequence[Tokens]) -> Tokens:
    """[n] texts with SEPARATOR around each."""
    joined = np.full(sum(map(len, texts)) + len(texts) + 1, SEPARATOR, np.uint32)
    start = 1
    for text in texts:
        joined[start : start + len(text)] = text
        start += len(text) + 1
    return joined


def sort_positions(tokens: Tokens, check: Callable[[], None] = lambda: None) -> Tokens:
    """[n] the positions of `tokens`, ordered by the MAX_MATCH tokens before each, the nearest first.

    Positions with equal tokens before them are in rising order. Prefix doubling over the reversed text (Manber and
    Myers 1990), in which only the positions that are still tied are sorted again (Larsson and Sadakane 1999). `check`
    is called between the steps and may raise.
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
        check()
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


def reverse(tokens: Tokens) -> bytes:
    """`tokens` as SuffixIndex reads them: the last one first, big-endian, so that their bytes compare as they do."""
    return tokens[::-1].astype(">u4").tobytes()


def encode_end(text: Sequence[int]) -> bytes:
    """The last MAX_MATCH tokens of `text` as `SuffixIndex.longest` takes them: the nearest first, big-endian."""
    end = array("I", text[-MAX_MATCH:][::-1])
    if byteorder == "little":
        end.byteswap()
    return end.tobytes()


class SuffixIndex:
    """Finds where the end of a text occurs in other texts, in O(log n) comparisons of MAX_MATCH tokens."""

    def __init__(self, data: bytes | mmap, start: int, n_tokens: int, order: memoryview) -> None:
        """`data` holds the result of `reverse`, of `n_tokens`, from byte `start` on, maybe mapped from a file.

        `order` is a memoryview of uint32: the positions of `sort_positions` that may be found.
        """
        self._data = data
        self._start = start
        self._n_tokens = n_tokens
        self._order = order

    def longest(self, end: bytes) -> int:
        """The number of tokens of the longest match of `end`, which is of `encode_end`."""
        place = self._bisect(end)
        return max((self._count_common(i, end) for i in (place - 1, place) if 0 <= i < len(self._order)), default=0)

    def find(self, end: bytes) -> range:
        """The places in the order whose positions follow all of `end`."""
        above = (int.from_bytes(end) + 1).to_bytes(len(end))  # tokens are below SEPARATOR: this cannot overflow
        low = self._bisect(end)
        return range(low, self._bisect(above, low))

    def read(self, position: int, n: int) -> list[int]:
        """Up to `n` tokens from `position`; they end with their text."""
        stop = self._start + (self._n_tokens - position) * WIDTH
        data = self._data[max(self._start, stop - n * WIDTH) : stop]
        read: list[int] = np.frombuffer(data, ">u4")[::-1].tolist()
        return read[: read.index(SEPARATOR)] if SEPARATOR in read else read

    def _bisect(self, end: bytes, low: int = 0) -> int:
        """How many places come before those that `end` precedes; `low` at least."""
        data, base, n_bytes = self._data, self._start + self._n_tokens * WIDTH, len(end)

        def before(position: int) -> bytes:
            start = base - position * WIDTH
            return data[start : start + n_bytes]

        return bisect_left(self._order, end, low, key=before)

    def _count_common(self, i: int, end: bytes) -> int:
        """The number of tokens at the end of `end` that precede the position at place `i`."""
        start = self._start + (self._n_tokens - self._order[i]) * WIDTH
        known = self._data[start : start + len(end)]
        n = min(len(known), len(end))
        differing = int.from_bytes(known[:n]) ^ int.from_bytes(end[:n])
        return (n - (differing.bit_length() + 7) // 8) // WIDTH
