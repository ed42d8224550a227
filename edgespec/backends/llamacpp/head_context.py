"""A llama_context over a trained head whose rows are pairs of a hidden state and the token after it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgespec.backends.llamacpp.draft_context import MAX_ROWS, DraftContext
from edgespec.backends.llamacpp.experimental import find_function
from edgespec.backends.llamacpp.library import Library
from edgespec.backends.llamacpp.taps import Floats, float_rows
from edgespec.core.arrays import Logits
from edgespec.core.protocols import CheckCancelled
from edgespec.core.truncation import non_finite_error


class HeadContext(DraftContext):
    """Its cache keeps pairs by position; a pair's own state stands for the target's where there is none yet."""

    def __init__(
        self, lib: Library, model: Any, params: Any, *, vocab_size: int, check: CheckCancelled, sequence: int = 0
    ) -> None:
        """`params` have the sizes and types of the cache. Raises BackendError, Unsupported."""
        enable, self._states = find_function("llama_set_embeddings_nextn"), find_function("llama_get_embeddings_nextn")
        super().__init__(lib, model, params, vocab_size=vocab_size, check=check, sequence=sequence)
        self.size: int = lib.api.llama_model_n_embd_out(model)
        enable(self._native.handle, True, True)  # the states of rows with scores
        self._inputs = np.zeros((MAX_ROWS, self.size), np.float32)
        self._native.batch.native.embd = float_pointer(self._inputs)

    def encode(self, features: Floats, position: int) -> Floats:
        """[n, size] what pairs are made of, of the target's rows [n, width] of consecutive positions: the same.

        Raises Cancelled, BackendError.
        """
        return features

    def read(self, tokens: Sequence[int], states: Floats, position: int) -> None:
        """Add the pairs of encoded `states` [n, size] and `tokens`, without scores. Raises Cancelled, BackendError."""
        self._stage(tokens, states, position, outputs=0)
        self._native.decode()

    def decode(self, tokens: Sequence[int], states: Floats, position: int) -> tuple[Logits, Floats]:
        """Add the pairs of `states` [n, size] and `tokens`; (logits [V] after the last, its state [1, size] to go on).

        `states` are encoded rows, or the state of the pair before. llama.cpp scores all pairs. Raises Cancelled,
        BackendError.
        """
        n = len(tokens)
        self._stage(tokens, states, position, outputs=n)
        logits = self._native.decode()[n - 1].copy()
        if np.isnan(logits.max()):
            raise non_finite_error()
        return logits, self._read_states(n)[n - 1 :]

    def step(self, token: int, state: Floats, position: int) -> tuple[Logits, Floats] | None:
        """`decode` of a drafted token and the state of the pair before; None where the head drafts no further."""
        return self.decode([token], state, position)

    def _stage(self, tokens: Sequence[int], states: Floats, position: int, *, outputs: int) -> None:
        self._inputs[: len(tokens)] = states
        self._native.batch.chain(tokens, position, self._sequence, outputs=outputs)

    def _read_states(self, n: int) -> Floats:
        return float_rows(self._states(self._native.handle), n, self.size).copy()


def float_pointer(array: Floats) -> Any:
    """For a llama_batch's embeddings; `array` must stay alive."""
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
