"""A llama_context over a DFlash head: the target's hidden states become keys and values that a block attends to."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgespec.backends.llamacpp.batch import NativeBatch
from edgespec.backends.llamacpp.draft_context import MAX_ROWS, DraftContext
from edgespec.backends.llamacpp.library import Library
from edgespec.backends.llamacpp.taps import Floats
from edgespec.core.arrays import Logits
from edgespec.core.protocols import CheckCancelled

_ROPE_SECTIONS = 4  # positions of a row of states where the rotary embedding has sections


class BlockContext(DraftContext):
    """Its cache has the keys and values of the target's states by position, and while it drafts those of a block.

    Follows src/models/dflash.cpp of llama.cpp, which takes the embeddings and the output matrix of `ctx_other` where
    the head has none.
    """

    def __init__(
        self,
        lib: Library,
        model: Any,
        params: Any,
        *,
        width: int,
        vocab_size: int,
        is_causal: bool,
        check: CheckCancelled,
    ) -> None:
        """`width`: numbers of a target's row. `is_causal`: whether a block's rows see only those before.

        Raises BackendError.
        """
        super().__init__(lib, model, params, vocab_size=vocab_size, check=check)
        lib.api.llama_set_causal_attn(self._native.handle, is_causal)
        self._features = np.zeros((MAX_ROWS, width), np.float32)
        self._positions = np.zeros(_ROPE_SECTIONS * MAX_ROWS, np.int32)
        self._states = NativeBatch(lib.api, MAX_ROWS, 1)
        self._states.native.token = None
        self._states.native.embd = self._features.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        self._states.native.pos = self._positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))

    def inject(self, features: Floats, position: int) -> None:
        """Add the target's rows [n, width] of consecutive positions, at most MAX_ROWS. Raises Cancelled, BackendError.

        Where the rotary embedding has sections, those of text have one position and the last has none.
        """
        n = len(features)
        self._features[:n] = features
        self._states.chain([0] * n, position, 0, outputs=0)
        sections = self._positions[: _ROPE_SECTIONS * n].reshape(_ROPE_SECTIONS, n)
        sections[:-1] = np.arange(position, position + n)
        sections[-1] = 0
        self._native.decode(self._states)

    def draft(self, tokens: Sequence[int], position: int) -> Logits:
        """[n, V] of the rows of a block: a view that the next call overwrites. Its rows stay in the cache until `trim`.

        Raises Cancelled, BackendError.
        """
        self._native.batch.chain(tokens, position, 0, outputs=len(tokens))
        return self._native.decode()[: len(tokens)]
