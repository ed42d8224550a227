"""A llama_context: its handle, its output buffer, and how a decode in it is cancelled."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from edgespec.backends.llamacpp.abi import SCORE_ALL
from edgespec.backends.llamacpp.batch import FullBatch, NativeBatch
from edgespec.backends.llamacpp.library import Library
from edgespec.core.arrays import Logits
from edgespec.errors import BackendError, Cancelled
from edgespec.machines.huge_pages import NewMemory

MAX_TOKENS = 512  # tokens of one decode: n_batch and n_ubatch
_ABORTED, _NO_KV_SLOT = 2, 1  # what llama_decode returns
_MAX_UNPOLLED_S = 0.1  # a decode that is expected to take no longer cannot be cancelled while it runs


class NativeContext:
    """One llama_context. `is_broken`: a decode has failed for a reason that no retry mends."""

    def __init__(
        self,
        lib: Library,
        model: Any,
        params: Any,
        vocab_size: int,
        *,
        max_outputs: int,
        sequences: int,
        is_cancelled: Callable[[], bool],
        max_tokens: int = MAX_TOKENS,
        has_streams: bool = False,
    ) -> None:
        """`params` have the sizes and types of the cache. Its buffers are for `max_tokens` rows of a decode.

        `has_streams`: each of the `sequences` has an equal part of the cells for itself. Raises BackendError.
        """
        scores_all = lib.metadata(model, b"general.architecture") in SCORE_ALL
        max_outputs = max_tokens if scores_all else max_outputs
        params.n_batch = params.n_ubatch = max_tokens
        params.n_outputs_max = max_outputs
        params.n_seq_max = sequences
        params.kv_unified = not has_streams
        lib.log.clear_error()
        new_memory = NewMemory()
        # Advised when its size is logged: then the cache is allocated and not cleared yet.
        lib.log.on_line = lambda line: new_memory.advise() if "KV buffer size" in line else None
        self.handle = lib.api.llama_init_from_model(model, params)
        lib.log.on_line = None
        new_memory.advise()  # the buffers of forwards
        if not self.handle:
            raise BackendError(
                f"llama.cpp could not set up a context of {params.n_ctx} tokens: {lib.log.reason()}.",
                hint="Use a smaller --ctx, fewer --parallel answers, or fewer --gpu-layers.",
            )
        self.batch = (FullBatch if scores_all else NativeBatch)(lib.api, max_tokens, sequences)
        self.is_broken = False
        self._lib = lib
        self._is_cancelled = is_cancelled
        self._callback = lib.api.ggml_abort_callback(lambda _data: is_cancelled())  # llama.cpp keeps only a pointer
        self._no_callback = lib.api.ggml_abort_callback()
        self._is_installed = False
        self._row_s = math.inf  # seconds a row, of the last decode that succeeded
        self._shape = (max_outputs, vocab_size)
        self._outputs: Logits = np.empty((0, vocab_size), np.float32)
        self._address = 0  # of the buffer that it views

    @property
    def memory(self) -> Any:
        """The llama_memory_t handle of its cache."""
        return self._lib.api.llama_get_memory(self.handle)

    def decode(self, batch: NativeBatch | None = None) -> Logits:
        """Decode `batch`, or its own, clear it and wait: [n_outputs or more, V], mostly a view of llama.cpp's buffer.

        The first rows are those of the batch's outputs; the next decode overwrites them. Raises Cancelled if nobody
        wants them, BackendError.
        """
        batch = batch or self.batch
        n_tokens, asked = batch.native.n_tokens, batch.seal()
        started = perf_counter()
        self.run(self._lib.api.llama_decode, batch)
        outputs: Logits = self._find_outputs()[asked]
        self._row_s = (perf_counter() - started) / n_tokens
        return outputs

    def run(self, function: Callable[[Any, Any], int], batch: NativeBatch | None = None) -> None:
        """Have llama_decode or llama_encode run `batch`, or its own, and clear it. Raises as `decode`."""
        batch = batch or self.batch
        self._lib.log.clear_error()
        is_wanted = self._prepare_abort(batch.native.n_tokens)
        code = function(self.handle, batch.native) if is_wanted else _ABORTED
        batch.clear()
        if code:
            raise self._error(code)

    def free(self) -> None:
        self._lib.api.llama_free(self.handle)
        self.handle = None

    def _prepare_abort(self, n_tokens: int) -> bool:
        """Install ggml's abort callback for a long decode of `n_tokens` alone; returns whether to start that decode.

        ggml calls it for each node of its graph, which costs a sixth of the decode time of a model of 6M parameters.
        """
        is_long = n_tokens * self._row_s > _MAX_UNPOLLED_S
        if is_long != self._is_installed:
            self._is_installed = is_long
            callback = self._callback if is_long else self._no_callback
            self._lib.api.llama_set_abort_callback(self.handle, callback, None)
        return is_long or not self._is_cancelled()

    def _error(self, code: int) -> Exception:
        if code == _ABORTED:
            return Cancelled()
        if code == _NO_KV_SLOT:
            return BackendError("llama.cpp's cache is full.", hint="Set a larger --ctx, or start a new chat.")
        self.is_broken = True
        return BackendError(
            f"llama.cpp failed to decode (code {code}): {self._lib.log.reason()}.",
            hint="Try again; if it persists, run with --verbose and report the log.",
        )

    def _find_outputs(self) -> Logits:
        """A view of the output buffer. llama_get_logits waits for an accelerator to finish. Raises BackendError."""
        pointer = self._lib.api.llama_get_logits(self.handle)
        if not pointer:
            raise BackendError("llama.cpp returned no logits.", hint="Report this as a bug, with --verbose output.")
        address = ctypes.addressof(pointer.contents)
        if address != self._address:  # making a view costs 20 us
            self._address = address
            self._outputs = np.ctypeslib.as_array(pointer, self._shape)
        return self._outputs
