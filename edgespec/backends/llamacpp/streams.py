"""The streams of a shared context: each of its sequences has cells of its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.backends.llamacpp.native_context import NativeContext

_MAX_GAP = 2  # streams between two that decode, for which rows are computed and dropped
_HEAD, _WORD = 8, 4  # bytes before a state, which llama.cpp checks, and of a count in it


class Streams:
    """The streams of a native context, their copies that are not made yet, and the gaps between those that decode.

    llama.cpp joins rows in one forward only if the ids of their streams are consecutive, and reads the weights once
    more for each gap. A gap is filled by rows for the streams in it, which are computed and dropped. That is faster if
    a forward spends most of its time on reading weights, and slower if it spends it on computing rows. So both ways are
    timed.

    copying  ids of the streams that are copied, or copied to, before the next decode
    """

    def __init__(self, api: Any, native: NativeContext, n: int, size: int, max_rows: int) -> None:
        """`n` streams of `size` cells each; a decode has at most `max_rows` rows."""
        self.copying: set[int] = set()
        self._api, self._native = api, native
        self._n, self._size, self._max_rows = n, size, max_rows
        self._seconds: dict[tuple[tuple[int, int], bool], float] = {}  # of decodes by rows and gaps, and whether filled
        self._filled: dict[int, int] = {}  # the streams that get a row in the decode under way, and where
        self._key = (0, 0)  # its rows and gaps

    def fill_gaps(self, ids: Sequence[int], n_rows: int) -> dict[int, int]:
        """The streams that fill gaps of a decode by a row each, with the position of that row.

        The decode has `n_rows` rows in the streams `ids`, which ascend.
        """
        found: dict[int, int] = {}
        for low, high in pairwise(ids):
            between = range(low + 1, high)
            if 0 < len(between) <= _MAX_GAP and n_rows + len(found) + len(between) <= self._max_rows:
                ends = {each: 1 + self._api.llama_memory_seq_pos_max(self._native.memory, each) for each in between}
                found |= ends if max(ends.values()) < self._size else {}
        self._key = n_rows, len(found)
        is_faster = self._seconds.get((self._key, True), 0.0) <= self._seconds.get((self._key, False), 0.0)
        self._filled = found if is_faster else {}
        return self._filled

    def end_decode(self, seconds: float | None) -> None:
        """Drop the added rows. `seconds`: of the decode; None if it has failed."""
        for sequence, position in self._filled.items():
            self._api.llama_memory_seq_rm(self._native.memory, sequence, position, -1)
        if seconds is None:
            return
        self.copying.clear()
        if self._key[1]:
            way, other = (self._key, bool(self._filled)), (self._key, not self._filled)
            known = self._seconds.get(way, seconds)
            self._seconds[way] = known + 0.2 * (seconds - known)
            if other in self._seconds:
                self._seconds[other] *= 0.995  # it is tried again some time

    def cut_state(self, state: bytearray, sequence: int) -> memoryview:
        """`state`, that of a sequence, in the format of a context without streams.

        A state has a head, the number of streams, and for each stream the number of its cells and the cells. Streams of
        other sequences have none.
        """
        start, end = _HEAD + _WORD * (1 + sequence), len(state) - _WORD * (self._n - 1 - sequence)
        begin = start - _HEAD - _WORD
        state[begin:start] = state[:_HEAD] + (1).to_bytes(_WORD, "little")
        return memoryview(state)[begin:end]

    def pad_state(self, state: memoryview) -> memoryview:
        """A writable copy, in the format of this context, of what `cut_state` of this or another one has returned."""
        head, cells, empty = bytearray(state[:_HEAD]), state[_HEAD + _WORD :], bytes(_WORD * (self._n - 1))
        return memoryview(head + self._n.to_bytes(_WORD, "little") + cells + empty)
