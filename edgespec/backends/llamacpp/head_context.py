"""A llama_context over an EAGLE-3 head: its encoder fuses hidden states of the target, its decoder is one layer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgespec.backends.llamacpp.batch import NativeBatch
from edgespec.backends.llamacpp.experimental import find_function
from edgespec.backends.llamacpp.library import Library
from edgespec.backends.llamacpp.native import NativeContext
from edgespec.backends.llamacpp.pending import SequenceSlot
from edgespec.backends.llamacpp.taps import Floats, float_rows
from edgespec.core.arrays import Logits
from edgespec.core.protocols import CheckCancelled
from edgespec.core.truncation import non_finite_error
from edgespec.errors import RollbackError

MAX_ROWS = 64  # of one call; the decoder computes the logits of all


class HeadContext:
    """Rows are pairs of a hidden state and the token after it; a cache keeps them by position.

    Follows src/models/eagle3.cpp of llama.cpp, which takes the embeddings and the output matrix of `ctx_other` where
    the head has none.
    """

    def __init__(
        self, lib: Library, model: Any, params: Any, *, width: int, vocab_size: int, check: CheckCancelled
    ) -> None:
        """`width`: numbers of a target's row. Raises BackendError, Unsupported."""
        enable, self._states = find_function("llama_set_embeddings_nextn"), find_function("llama_get_embeddings_nextn")
        self._api = lib.api
        self._size: int = lib.api.llama_model_n_embd(model)
        slot = SequenceSlot(0, check)
        self._native = NativeContext(
            lib,
            model,
            params,
            vocab_size,
            max_outputs=MAX_ROWS,
            sequences=1,
            is_cancelled=lambda: slot.is_cancelled,
        )
        enable(self._native.handle, True, True)
        self._features = np.zeros((MAX_ROWS, width), np.float32)
        self._fused = np.zeros((MAX_ROWS, self._size), np.float32)
        self._encoded = NativeBatch(lib.api, MAX_ROWS, 1)
        self._encoded.native.token = None
        self._encoded.native.embd = _float_pointer(self._features)
        self._native.batch.native.embd = _float_pointer(self._fused)

    def encode(self, features: Floats, position: int) -> Floats:
        """[n, size] the target's rows [n, width], of consecutive positions, at the head's own size.

        Raises Cancelled, BackendError.
        """
        n = len(features)
        self._features[:n] = features
        self._encoded.chain([0] * n, position, 0, outputs=n)
        self._native.encode(self._encoded)
        return self._read_states(n)

    def decode(self, tokens: Sequence[int], fused: Floats, position: int) -> tuple[Logits, Floats]:
        """Add the pairs of `fused` [n, size] and `tokens`; (logits [V] after the last, its state [1, size] to go on).

        `fused` are encoded rows, or the state of the pair before. Raises Cancelled, BackendError.
        """
        n = len(tokens)
        self._fused[:n] = fused
        self._native.batch.chain(tokens, position, 0, outputs=n)
        logits = self._native.decode()[n - 1].copy()
        if np.isnan(logits.max()):
            raise non_finite_error()
        return logits, self._read_states(n)[n - 1 :]

    def trim(self, position: int) -> None:
        """Drop the pairs from `position` on. Raises RollbackError."""
        if not self._api.llama_memory_seq_rm(self._native.memory, 0, position, -1):
            raise RollbackError("llama.cpp could not trim the head's cache.", hint="Start a new chat.")

    def free(self) -> None:
        self._native.free()

    def _read_states(self, n: int) -> Floats:
        return float_rows(self._states(self._native.handle), n, self._size).copy()


def _float_pointer(array: Floats) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
