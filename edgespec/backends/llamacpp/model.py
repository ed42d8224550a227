"""A GGUF model on llama.cpp: its weights, and sessions on them."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from edgespec.backends import device_memory
from edgespec.backends.attached_draft import AttachedDraft, AttachedHead, SelfDraftSpec
from edgespec.backends.llamacpp.cells import Cells
from edgespec.backends.llamacpp.context import Context
from edgespec.backends.llamacpp.embedder import LlamaEmbedder
from edgespec.backends.llamacpp.library import Library, library, list_handles, place_tensors
from edgespec.backends.llamacpp.remote_devices import RemoteDevices
from edgespec.backends.llamacpp.rewrite import count_blocks
from edgespec.backends.llamacpp.rollback import Rollback, SnapshotCache, SnapshotRing
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.llamacpp.tiles import amx_is_sound
from edgespec.backends.llamacpp.tokenizer import LlamaTokenizer
from edgespec.backends.llamacpp.tree_branches import TrimmableCache
from edgespec.backends.llamacpp.tree_cache import TreeCache
from edgespec.backends.options import STATE_SNAPSHOTS, LoadOptions, idle_cores
from edgespec.backends.settings import RuntimeSettings
from edgespec.cancel import check_cancelled
from edgespec.errors import DoesNotFit, EdgespecError, InvalidModelFile, names_memory
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.heads import HeadSpec
from edgespec.machines.huge_pages import NewMemory
from edgespec.machines.memory import RAM, split_places, split_shares
from edgespec.progress import report_loaded

S = TypeVar("S", bound=LlamaSession)
C = TypeVar("C")
_KV_TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}  # ggml_type
_FLOATS = ("F32", "F16", "BF16")


class LlamaModel:
    """A backends.Model: a loaded GGUF file. One thread uses it and its sessions; close() frees it after them."""

    def __init__(self, lib: Library, handle: Any, path: Path, options: LoadOptions) -> None:
        api = lib.api
        self._lib = lib
        self._handle = handle
        self.options = self._given = options
        self.path = path
        self.remote: RemoteDevices | None = None
        self.tokenizer = LlamaTokenizer(api, api.llama_model_get_vocab(handle))
        self.context_size: int = options.context_for(api.llama_model_n_ctx_train(handle))
        self._shared_context: Context | None = None
        self._tree_cache: TreeCache | None = None
        self.lends_cells = 0  # number of self-drafts that copy the cells of its sessions
        self.is_recurrent = bool(api.llama_model_is_recurrent(handle) or api.llama_model_is_hybrid(handle))
        self.is_row_invariant = _is_row_invariant(lib, path, options)

    @property
    def no_tree_reason(self) -> str | None:
        if self.has_streams and not self.options.tree_cache:
            return f"its {self.options.caches} parallel answers have caches of their own"
        return "its state is recurrent" if self.is_recurrent else None

    @property
    def has_streams(self) -> bool:
        """Whether each session of the shared context has cells of its own, see Context.

        Without streams a row's attention passes over the cells of all texts, those that are only kept too. With streams
        drafts have no branches, and llama.cpp splits forwards whose texts have unequal numbers of rows.
        """
        return self.options.caches > 1 and not self.lends_cells and self.no_batching_reason is None

    @property
    def has_window(self) -> bool:
        """Whether some of its layers attend to a sliding window."""
        return bool(self._lib.api.llama_model_n_swa(self._handle))

    @property
    def no_batching_reason(self) -> str | None:
        api, size = self._lib.api, self.context_size
        stated = self._metadata("rope.scaling.original_context_length")
        original = int(stated) if stated.isdigit() else 0
        if not original and self._metadata("rope.scaling.type") == b"longrope":
            original = api.llama_model_n_ctx_train(self._handle)
        reasons: dict[str, object] = {
            "the model has one cache": self.options.caches == 1,
            "its state is recurrent": self.is_recurrent,
            # llama.cpp reuses such cells for other texts silently
            "cells behind its attention window are not kept": self.has_window,
            "its rotary positions depend on the size of the cache": size <= original < size * self.options.caches,
            "the forwards of --exact have the rows of one text": self.options.exact,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

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
        return int(self._lib.api.llama_model_n_layer(self._handle))

    @property
    def hidden_size(self) -> int:
        """Numbers of a token's hidden state between layers."""
        return int(self._lib.api.llama_model_n_embd(self._handle))

    def make_self_draft(self, spec: SelfDraftSpec, *, folder: Path) -> AttachedDraft:
        from edgespec.backends.llamacpp.selfdraft import open_self_draft

        return open_self_draft(self, spec, folder)

    def load_head(self, spec: HeadSpec, path: Path) -> AttachedHead:
        from edgespec.backends.llamacpp.heads import open_head

        return open_head(self, path, spec)

    def measure_settings(self, seconds: float) -> RuntimeSettings | None:
        """The fastest settings, measured for about `seconds` on sessions of their own; no other may be open.

        The runtime's own if there is no time or memory to measure, None if everything is set. Raises Cancelled.
        """
        from edgespec.backends.llamacpp.settings import SettingsMeasurement

        return SettingsMeasurement(self, seconds).run()

    def use(self, settings: RuntimeSettings) -> None:
        """Open later sessions with `settings`, but for what the user has set."""
        self.options = settings.apply(self._given)

    def allow_tree_cache(self, *, allowed: bool) -> None:
        """Set whether later shared contexts have a cache for a text that is alone, see LoadOptions."""
        self._given = replace(self._given, tree_cache=allowed)
        self.options = replace(self.options, tree_cache=allowed)

    def open_session(self, *, shared: bool = False) -> LlamaSession:
        """A session with a KV cache of its own, or in the shared context. Raises BackendError."""
        if not shared or self.no_batching_reason is not None:
            return self.open_as(LlamaSession)
        if self._shared_context is None or not self._shared_context.is_usable:
            slots = self.options.caches
            cells = self.context_size * slots
            self._shared_context = self._open_context(cells, slots, has_streams=self.has_streams)
            has_trees = self.has_streams and self.options.tree_cache
            self._tree_cache = TreeCache(self._open_alone) if has_trees else None
        opened = partial(LlamaSession, tree_cache=self._tree_cache)
        return self._open_session(opened, self._shared_context, self.context_size)

    def open_as(self, kind: Callable[..., S], cells: int | None = None) -> S:
        """A session of class `kind` with a cache of its own, of at most `cells` tokens. Raises BackendError."""
        context = self._open_context(min(self.context_size, cells or self.context_size), 1)
        # llama.cpp rounds up to a multiple of 256 tokens; the surplus is not used.
        size = self.context_size if cells else min(self.context_size, self._lib.api.llama_n_ctx(context.native.handle))
        return self._open_session(kind, context, size)

    def close(self) -> None:
        if self._handle:
            self._lib.api.llama_model_free(self._handle)
            self._handle = None
        if self.remote is not None:
            self.remote.close()
            self.remote = None

    def close_with_tokenizer(self) -> None:
        """Instead of `close`: free the model when its tokenizer is collected."""
        weakref.finalize(self.tokenizer, self._lib.api.llama_model_free, self._handle).atexit = False

    def open_embedder(self, cells: int) -> LlamaEmbedder:
        return LlamaEmbedder(self._lib, self._handle, self._params(cells), self.tokenizer.vocab_size)

    def open_beside(
        self, target: LlamaSession, context: Callable[..., C], *, is_mtp: bool, more_cells: int, **settings: Any
    ) -> C:
        """Opens a `context`, made with `settings`, for a head in these weights, with `more_cells` than `target` has.

        `is_mtp`: the head has MTP layers, or is an assistant.
        """
        params = self._params(target.capabilities.context_size + more_cells)
        params.n_rs_seq = 0
        params.ctx_other = target.home.context.native.handle  # which lives as long as the session
        if is_mtp:
            params.ctx_type = self._lib.api.LLAMA_CONTEXT_TYPE_MTP
        return context(self._lib, self._handle, params, vocab_size=self.tokenizer.vocab_size, **settings)

    def _open_alone(self) -> Cells:
        """The cells of a context for one session. Raises BackendError."""
        context = self._open_context(self.context_size, 1)
        slot = context.acquire()
        return Cells(context, slot, self._make_rollback(context, slot.sequence))

    def _open_context(self, cells: int, slots: int, *, has_streams: bool = False) -> Context:
        params, vocab_size, has_trees = self._params(cells), self.tokenizer.vocab_size, not self.is_recurrent
        return Context(self._lib, self._handle, params, vocab_size, slots, has_trees=has_trees, has_streams=has_streams)

    def _params(self, cells: int) -> Any:
        api, options = self._lib.api, self.options
        params = api.llama_context_default_params()
        params.n_ctx = cells
        params.n_rs_seq = STATE_SNAPSHOTS
        params.n_threads = options.threads or idle_cores()
        params.n_threads_batch = options.batch_threads or options.threads or idle_cores()
        params.type_k = params.type_v = _KV_TYPES["q8_0" if self.is_row_invariant else options.kv_type]
        needs_flash = self.is_row_invariant or options.kv_type != "f16"
        params.flash_attn_type = 1 if needs_flash else {None: -1, False: 0, True: 1}[options.flash_attention]
        return params

    def _metadata(self, key: str) -> bytes:
        """A value of the architecture's metadata as text; empty if there is none."""
        architecture = self._lib.metadata(self._handle, b"general.architecture")
        return self._lib.metadata(self._handle, architecture + b"." + key.encode())

    def _open_session(self, kind: Callable[..., S], context: Context, size: int) -> S:
        slot = context.acquire()
        rollback = self._make_rollback(context, slot.sequence)
        return kind(self._lib, context, slot, rollback, self.tokenizer.vocab_size, size)

    def _make_rollback(self, context: Context, sequence: int) -> Rollback:
        api = self._lib.api
        if snapshots := api.llama_n_rs_seq(context.native.handle):
            return SnapshotRing(api, context, sequence, snapshots)
        if self.is_recurrent:
            return SnapshotCache(api, context, sequence)
        return TrimmableCache(api, context, sequence, keeps_order=self.is_row_invariant)


def load(path: Path, options: LoadOptions, *, vocabulary_only: bool = False, sees_gpus: bool = False) -> LlamaModel:
    """Load a GGUF file whose header formats.gguf_validate has checked.

    With `vocabulary_only` it has a tokenizer and a chat template, but opens no sessions. `sees_gpus`: the model may use
    GPUs even if no layer of it lies there, for graphs with tensors of another model that does. Raises InvalidModelFile,
    BackendUnavailable, Cancelled, BackendError; InvalidRequest for devices and workers.
    """
    lib = library()
    api = lib.api
    params = api.llama_model_default_params()
    params.vocab_only = vocabulary_only
    params.load_mtp = options.mtp
    params.n_gpu_layers = -1 if options.gpu_layers is None else options.gpu_layers
    _place(api, params, options, on_host=options.on_host and not sees_gpus)
    params.load_mode = _load_mode(api, options)
    if not amx_is_sound():
        params.use_extra_bufts = False
    if _is_row_invariant(lib, path, options):
        params.use_extra_bufts = False
        os.environ["GGML_CPU_TILED_MM"] = "0"  # ggml reads it at the first forward of the process
    errors: list[BaseException] = []
    new_memory = NewMemory()

    def report(fraction: float, _data: object) -> bool:
        try:
            if fraction == 0.0:  # the buffers are allocated and empty
                new_memory.advise()
            check_cancelled()
            report_loaded(fraction)
        except BaseException as error:  # noqa: BLE001 - it cannot cross the native frames; raised again below
            errors.append(error)
            return False
        return True

    callback = api.llama_progress_callback(report)
    params.progress_callback = callback
    lib.log.clear_error()
    with ExitStack() as undo:
        remote: RemoteDevices | None = None
        if options.workers and not vocabulary_only:
            remote = RemoteDevices(options.workers)
            undo.callback(remote.close)
            remote.place(params, path, options)
        handle = api.llama_model_load_from_file(os.fsencode(path), params)
        if errors:
            raise errors[0]
        if not handle:
            raise _load_error(path, lib.log.reason())
        model = LlamaModel(lib, handle, path, options)
        model.remote = remote
        undo.pop_all()
    return model


def _place(api: Any, params: Any, options: LoadOptions, *, on_host: bool) -> None:
    """Write what devices get into llama_model_params. Raises InvalidRequest for a device that there is not."""
    places = [*split_places(options.override_tensor)]
    places += [(rf"^blk\.{layer}\.ffn_.*_exps", RAM) for layer in range(options.n_cpu_moe or 0)]
    if others := [name for _, name in places if name != RAM]:
        device_memory("llamacpp", others)
    place_tensors(params, places)
    if not on_host and options.device is None and options.tensor_split is None:
        return
    names = [] if on_host else [gpu.name for gpu in device_memory("llamacpp", options.device)]
    shares = () if on_host else split_shares(options.tensor_split, len(names))
    params.handles = list_handles(names)  # lives as long as what points to it
    params.devices = ctypes.cast(params.handles, ctypes.c_void_p)
    if shares:
        params.tensor_split = (ctypes.c_float * api.llama_max_devices())(*shares)


def _load_mode(api: Any, options: LoadOptions) -> int:
    if options.mlock:
        mode = api.LLAMA_LOAD_MODE_MMAP_MLOCK if options.mmap else api.LLAMA_LOAD_MODE_MLOCK
    else:
        mode = api.LLAMA_LOAD_MODE_MMAP if options.mmap else api.LLAMA_LOAD_MODE_NONE
    return int(mode)


def _load_error(path: Path, reason: str) -> EdgespecError:
    if "RPC" in reason:
        return DoesNotFit(
            f"a worker has no memory for its part of {path.name}: {reason}.",
            hint="Add a worker, use a smaller --ctx, or give the workers fewer layers (--gpu-layers N).",
        )
    if names_memory(reason):
        return DoesNotFit(
            f"{path.name} does not fit: {reason}.",
            hint="Use fewer --gpu-layers, another quantization, or a smaller --ctx.",
        )
    return InvalidModelFile(
        f"llama.cpp cannot load {path.name}: {reason}.",
        hint="Pull it again, or upgrade llama-cpp-python if the model is newer than it.",
    )


def _is_row_invariant(lib: Library, path: Path, options: LoadOptions) -> bool:
    """Whether `--exact` takes kernels whose results do not depend on the number of rows.

    There are some on a CPU, for quantized weights: flash attention over a q8_0 cache, no repacked weights, no tiled f16
    kernels. Matrices of floats, such as a mixture's routers, are multiplied by other kernels for several rows. MTP
    layers only draft.
    """
    is_asked = options.exact and options.exact_width is None and not options.workers
    if not is_asked or any(each.kind != "cpu" for each in lib.devices()):
        return False
    header = read_file(path)
    tensors = {each.name: each for each in header.tensors if each.block < count_blocks(header)}
    if "output.weight" in tensors:
        tensors.pop("token_embd.weight", None)  # whose rows are only read
    return not any(len(each.shape) > 1 and each.type.name in _FLOATS for each in tensors.values())
