"""A text as one vector: the mean of the last layer's output over its tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from edgespec.backends.llamacpp.batch import NativeBatch
from edgespec.backends.llamacpp.library import Library
from edgespec.backends.sequence import check_ids
from edgespec.core.arrays import Logits
from edgespec.core.batching import YIELD, Yield
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import BackendError

_ROWS = 64  # tokens a decode: llama.cpp reserves logits of the whole vocabulary for each
_NO_POOLING = 0


class LlamaEmbedder:
    """Computes embeddings in a context of its own."""

    def __init__(self, lib: Library, model: Any, params: Any, vocab_size: int, check: CheckCancelled) -> None:
        """`params` have the sizes and types of the cache. Raises BackendError."""
        api = lib.api
        params.n_batch = params.n_ubatch = params.n_outputs_max = _ROWS
        params.n_seq_max = 1
        params.embeddings = True
        params.pooling_type = _NO_POOLING
        lib.log.clear_errors()
        self._context = api.llama_init_from_model(model, params)
        if not self._context:
            raise BackendError(
                f"llama.cpp could not set up a context for embeddings: {lib.log.reason()}.", hint="Use a smaller --ctx."
            )
        self._lib = lib
        self._check = check
        self._vocab_size = vocab_size
        self._width: int = api.llama_model_n_embd_out(model)
        self._batch = NativeBatch(api, _ROWS, 1)

    def embed(self, tokens: Sequence[int]) -> Generator[Yield, None, Logits]:
        """See backends.Embedder."""
        api = self._lib.api
        check_ids(tokens, self._vocab_size)
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        total = np.zeros(self._width)
        for start in range(0, len(tokens), _ROWS):
            self._check()
            chunk = tokens[start : start + _ROWS]
            self._batch.clear()
            self._batch.chain(chunk, start, 0, outputs=len(chunk))
            self._lib.log.clear_errors()
            if code := api.llama_decode(self._context, self._batch.native):
                raise self._lib.decode_error(code)
            pointer = api.llama_get_embeddings(self._context)
            if not pointer:
                raise BackendError("the model has no embeddings.", hint="Use another model for embeddings.")
            floats = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
            rows = np.ctypeslib.as_array(floats, (len(chunk), self._width))
            total += rows.sum(axis=0)
            yield YIELD
        length = float(np.linalg.norm(total))
        if not np.isfinite(length) or not length:
            raise BackendError("the embedding of this text is not finite.", hint="Use another model for embeddings.")
        return (total / length).astype(np.float32)

    def close(self) -> None:
        if self._context:
            self._lib.api.llama_free(self._context)
            self._context = None
