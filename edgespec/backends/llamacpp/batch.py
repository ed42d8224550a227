"""A llama_batch over numpy arrays, filled in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class NativeBatch:
    """Up to `rows` rows, each in up to `sequences` sequences. llama.cpp reads the arrays, which this object owns."""

    def __init__(self, api: Any, rows: int, sequences: int) -> None:
        self._token = np.zeros(rows, np.int32)
        self._pos = np.zeros(rows, np.int32)
        self._n_seq = np.ones(rows, np.int32)
        self._seq = np.zeros((rows, sequences), np.int32)
        self._seq_pointers = self._seq.ctypes.data + np.arange(rows, dtype=np.uint64) * np.uint64(self._seq.strides[0])
        self._output = np.zeros(rows, np.int8)
        self._arange = np.arange(rows, dtype=np.int32)
        int32_p = ctypes.POINTER(ctypes.c_int32)
        self.native = api.llama_batch()
        self.native.token = self._token.ctypes.data_as(int32_p)
        self.native.pos = self._pos.ctypes.data_as(int32_p)
        self.native.n_seq_id = self._n_seq.ctypes.data_as(int32_p)
        self.native.seq_id = ctypes.cast(self._seq_pointers.ctypes.data, ctypes.POINTER(int32_p))
        self.native.logits = self._output.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))

    def chain(self, tokens: Sequence[int], position: int, sequence: int, *, outputs: int) -> None:
        """Add `tokens` one after another from `position` in `sequence`; the last `outputs` rows yield logits."""
        start = self.native.n_tokens
        end = start + len(tokens)
        self._token[start:end] = tokens
        self._pos[start:end] = self._arange[: end - start] + position
        self._n_seq[start:end] = 1
        self._seq[start:end, 0] = sequence
        self._output[start:end] = 0
        self._output[end - outputs : end] = 1
        self.native.n_tokens = end

    def tree(self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[Sequence[int]]) -> None:
        """Add a row for each token, at its position and in all of its `sequences`; every row yields logits."""
        start = self.native.n_tokens
        end = start + len(tokens)
        self._token[start:end] = tokens
        self._pos[start:end] = positions
        self._output[start:end] = 1
        for row, ids in enumerate(sequences, start):
            self._n_seq[row] = len(ids)
            self._seq[row, : len(ids)] = ids
        self.native.n_tokens = end

    def share(self) -> None:
        n, count = self.native.n_tokens, self._seq.shape[1]
        self._n_seq[:n], self._seq[:n] = count, np.arange(count)

    def seal(self) -> slice | npt.NDArray[np.intp]:
        """Called before a decode; returns which of its outputs the rows have asked for."""
        return slice(None)

    def clear(self) -> None:
        self.native.n_tokens = 0


class FullBatch(NativeBatch):
    """Asks for the scores of all rows. Some graphs score every row whatever is asked, and llama.cpp would then return
    their first scores in place of those that were asked for.
    """

    def seal(self) -> npt.NDArray[np.intp]:
        output = self._output[: self.native.n_tokens]
        asked = output.nonzero()[0]
        output[:] = 1
        return asked
