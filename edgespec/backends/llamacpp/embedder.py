"""A text as one vector: the mean of the last layer's output over its tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from edgespec.backends.llamacpp.hidden_states import float_rows
from edgespec.backends.llamacpp.library import Library
from edgespec.backends.llamacpp.native_context import NativeContext
from edgespec.backends.sequence import check_ids
from edgespec.cancel import check_cancelled
from edgespec.core.arrays import Logits
from edgespec.core.peers import YIELD, Yield
from edgespec.errors import BackendError

_ROWS = 64  # tokens a decode: llama.cpp reserves logits of the whole vocabulary for each
_NO_POOLING = 0


class LlamaEmbedder:
    """Computes embeddings in a context of its own."""

    def __init__(self, lib: Library, model: Any, params: Any, vocab_size: int) -> None:
        """`params` have the sizes and types of the cache. Raises BackendError."""
        params.embeddings = True
        params.pooling_type = _NO_POOLING
        self._native = NativeContext(
            lib,
            model,
            params,
            vocab_size,
            max_outputs=_ROWS,
            sequences=1,
            is_cancelled=lambda: False,
            max_tokens=_ROWS,
        )
        self._api = lib.api
        self._vocab_size = vocab_size
        self._width: int = lib.api.llama_model_n_embd_out(model)

    def embed(self, tokens: Sequence[int]) -> Generator[Yield, None, Logits]:
        """[width] of norm 1, for 1 to `cells` tokens. Raises Cancelled, BackendError, ValueError for unknown ids."""
        check_ids(tokens, self._vocab_size)
        self._api.llama_memory_clear(self._native.memory, True)
        total = np.zeros(self._width)
        for start in range(0, len(tokens), _ROWS):
            check_cancelled()
            chunk = tokens[start : start + _ROWS]
            self._native.batch.chain(chunk, start, 0, outputs=len(chunk))
            self._native.run(self._api.llama_decode)
            pointer = self._api.llama_get_embeddings(self._native.handle)
            if not pointer:
                raise BackendError("the model has no embeddings.", hint="Use another model for embeddings.")
            rows = float_rows(ctypes.addressof(pointer.contents), len(chunk), self._width)
            total += rows.sum(axis=0)
            yield YIELD
        length = float(np.linalg.norm(total))
        if not np.isfinite(length) or not length:
            raise BackendError("the embedding of this text is not finite.", hint="Use another model for embeddings.")
        return (total / length).astype(np.float32)

    def close(self) -> None:
        if self._native.handle:
            self._native.free()
