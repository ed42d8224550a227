"""Load a GGUF file and open sessions on it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from edgespec.backends.llamacpp.library import Library, library
from edgespec.backends.llamacpp.rollback import CutCache, OrderedCutCache, Rollback, SnapshotCache, SnapshotRing
from edgespec.backends.llamacpp.session import MAX_ROWS, PREFILL_CHUNK, LlamaSession
from edgespec.backends.llamacpp.vocabulary import LlamaTokenizer
from edgespec.backends.options import LoadOptions, idle_cores
from edgespec.backends.selfdraft import SelfDraft, SelfDraftModel
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import BackendError, Cancelled, InvalidModelFile

S = TypeVar("S", bound=LlamaSession)

_STATE_SNAPSHOTS = 8  # recurrent states kept per decode where the architecture can; bounds its draft length
_KV_TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}  # ggml_type


class LlamaModel:
    """A loaded GGUF model. One thread uses it and its sessions; close() frees it after its sessions."""

    def __init__(self, lib: Library, handle: Any, path: Path, options: LoadOptions) -> None:
        api = lib.api
        self._lib = lib
        self._handle = handle
        self._options = options
        self.path = path
        self.tokenizer = LlamaTokenizer(api, api.llama_model_get_vocab(handle))
        self.context_size: int = options.context_for(api.llama_model_n_ctx_train(handle))
        self.is_recurrent = bool(api.llama_model_is_recurrent(handle) or api.llama_model_is_hybrid(handle))

    @property
    def limitation(self) -> str | None:
        return "its state is recurrent" if self.is_recurrent else None

    @property
    def chat_template(self) -> str | None:
        """The jinja source in the file's metadata."""
        raw: bytes | None = self._lib.api.llama_model_chat_template(self._handle, None)
        return raw.decode("utf-8", "replace") if raw else None

    @property
    def description(self) -> str:
        """Architecture, size and quantization in llama.cpp's words, such as 'llama 8B Q4_K - Medium'."""
        buffer = ctypes.create_string_buffer(128)
        self._lib.api.llama_model_desc(self._handle, buffer, 128)
        return buffer.value.decode("utf-8", "replace")

    @property
    def layer_count(self) -> int:
        count: int = self._lib.api.llama_model_n_layer(self._handle)
        return count

    @property
    def options(self) -> LoadOptions:
        return self._options

    def open_session(self, check: CheckCancelled = lambda: None) -> LlamaSession:
        """A session with its own KV cache; `check` is polled during every forward. Raises BackendError."""
        return self.open_as(LlamaSession, check)

    def open_as(self, kind: type[S], check: CheckCancelled, cells: int | None = None) -> S:
        """The same of another `kind`, with a cache of no more than `cells` tokens."""
        api, options = self._lib.api, self._options
        params = api.llama_context_default_params()
        params.n_ctx = min(self.context_size, cells or self.context_size)
        params.n_batch = params.n_ubatch = PREFILL_CHUNK
        params.n_outputs_max = MAX_ROWS
        params.n_seq_max = 1 if self.is_recurrent else MAX_ROWS
        params.kv_unified = True
        params.n_rs_seq = _STATE_SNAPSHOTS
        params.n_threads = params.n_threads_batch = options.threads or idle_cores()
        params.type_k = params.type_v = _KV_TYPES["q8_0" if options.exact else options.kv_type]
        needs_flash = options.exact or options.kv_type != "f16"
        params.flash_attn_type = 1 if needs_flash else {None: -1, False: 0, True: 1}[options.flash_attention]

        def aborts(_data: object) -> bool:
            try:
                check()
            except Cancelled:
                return True
            return False

        abort = api.ggml_abort_callback(aborts)
        params.abort_callback = abort
        self._lib.log.clear_errors()
        context = api.llama_init_from_model(self._handle, params)
        if not context:
            raise BackendError(
                f"llama.cpp could not set up a context of {self.context_size} tokens: {self._lib.log.reason()}.",
                hint="Use a smaller --ctx, or fewer --gpu-layers.",
            )
        size = self.context_size if cells else min(self.context_size, api.llama_n_ctx(context))  # a multiple of 256
        return kind(self._lib, context, abort, self._rollback(context), self.tokenizer.vocab_size, size, check)

    def self_draft(
        self, method: SelfDraft, *, folder: Path, progress: Callable[[float], None], check: CheckCancelled
    ) -> SelfDraftModel:
        """See backends.Model."""
        from edgespec.backends.llamacpp.selfdraft import open_self_draft

        return open_self_draft(self, method, folder, progress, check)

    def close(self) -> None:
        if self._handle:
            self._lib.api.llama_model_free(self._handle)
            self._handle = None

    def _rollback(self, context: Any) -> Rollback:
        snapshots = self._lib.api.llama_n_rs_seq(context)
        if snapshots:
            return SnapshotRing(self._lib.api, context, snapshots)
        if self.is_recurrent:
            return SnapshotCache(self._lib.api, context)
        return (OrderedCutCache if self._options.exact else CutCache)(self._lib.api, context)


def load(
    path: Path,
    options: LoadOptions,
    *,
    progress: Callable[[float], None] = lambda fraction: None,
    check: CheckCancelled = lambda: None,
    vocabulary_only: bool = False,
) -> LlamaModel:
    """Load a GGUF file whose header has been checked (registry.gguf). `progress` gets 0.0 to 1.0.

    With `vocabulary_only` it has a tokenizer and a chat template, and opens no sessions. Raises InvalidModelFile,
    BackendUnavailable, Cancelled.
    """
    lib = library()
    api = lib.api
    params = api.llama_model_default_params()
    params.vocab_only = vocabulary_only
    params.n_gpu_layers = -1 if options.gpu_layers is None else options.gpu_layers
    params.load_mode = api.LLAMA_LOAD_MODE_MMAP if options.mmap else api.LLAMA_LOAD_MODE_NONE
    if options.exact:
        params.use_extra_bufts = False
        os.environ["GGML_CPU_TILED_MM"] = "0"  # ggml reads it at the first forward of the process
    stopped: list[BaseException] = []

    def report(fraction: float, _data: object) -> bool:
        try:
            check()
            progress(fraction)
        except BaseException as error:  # noqa: BLE001 - it cannot cross the native frames; raised again below
            stopped.append(error)
            return False
        return True

    callback = api.llama_progress_callback(report)
    params.progress_callback = callback
    lib.log.clear_errors()
    handle = api.llama_model_load_from_file(os.fsencode(path), params)
    if stopped:
        raise stopped[0]
    if not handle:
        raise InvalidModelFile(
            f"llama.cpp cannot load {path.name}: {lib.log.reason()}.",
            hint="Pull it again, or upgrade llama-cpp-python if the model is newer than it.",
        )
    return LlamaModel(lib, handle, path, options)
