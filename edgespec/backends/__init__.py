"""Runtimes behind one contract, by name. Each is imported when one of its models is opened."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from edgespec.backends.attached_draft import AttachedDraft, AttachedHead, SelfDraftSpec
from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import Session
from edgespec.formats.heads import HeadSpec
from edgespec.machines.memory import DeviceMemory
from edgespec.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgespec.backends.llamacpp.embedder import LlamaEmbedder

FileBackend = Literal["llamacpp", "mlx"]
"""The runtimes that open model files."""

BackendName = Literal[FileBackend, "toy"]


class Model(Protocol):
    """A loaded model. One thread uses it and its sessions."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> str | None:
        """Jinja source, or None for a model without one."""

    @property
    def context_size(self) -> int:
        """Tokens that a session holds."""

    @property
    def no_tree_reason(self) -> str | None:
        """Why its sessions do not take trees, as a clause; None if they do."""

    @property
    def description(self) -> str:
        """Architecture, size and quantization, in words."""

    @property
    def no_batching_reason(self) -> str | None:
        """Why answers of shared sessions are made one after the other, as a clause; None if forwards batch."""

    @property
    def is_row_invariant(self) -> bool:
        """Whether the scores of a token are the same for any number of rows in its forward; see `LoadOptions.exact`."""

    def open_session(self, *, shared: bool = False) -> Session:
        """A session; at most `LoadOptions.caches` of them are `shared`. Raises BackendError."""

    def open_embedder(self, cells: int) -> LlamaEmbedder:
        """An embedder for at most `cells` tokens. Raises InvalidRequest if the runtime has none, BackendError."""

    @property
    def layer_count(self) -> int: ...

    def make_self_draft(self, spec: SelfDraftSpec, *, folder: Path) -> AttachedDraft:
        """Load a self-draft. `spec` names its layers; `folder` caches files that take long to make.

        Raises Unsupported, InvalidRequest, DoesNotFit, BackendError, CacheError, Cancelled.
        """

    def load_head(self, spec: HeadSpec, path: Path) -> AttachedHead:
        """Load the trained head at `path`, which `spec` describes.

        Raises Unsupported for a head that cannot run on this model, InvalidModelFile, BackendError, Cancelled.
        """

    def close(self) -> None:
        """Free the weights. Sessions are closed before."""


def open_model(backend: BackendName, path: Path, options: LoadOptions) -> Model:
    """Load a checked model file. Raises BackendUnavailable, InvalidModelFile, BackendError, Cancelled."""
    if backend == "llamacpp":
        from edgespec.backends.llamacpp.model import load

        return load(path, options)
    if backend == "toy":
        from edgespec.backends.toy import load as load_toy

        return load_toy(path.name, options)
    require("mlx")
    from edgespec.backends.mlx.model import load as load_mlx

    return load_mlx(path, options)


@contextmanager
def open_tokenizer(backend: FileBackend, path: Path) -> Iterator[Tokenizer]:
    """The tokenizer of a checked file or folder, inside of the block. Raises BackendUnavailable, InvalidModelFile."""
    if backend == "llamacpp" or path.is_file():  # MLX reads the packaged GGUF file with llama.cpp's tokenizer
        from edgespec.backends.llamacpp.model import load

        with closing(load(path, LoadOptions(), vocabulary_only=True)) as model:
            yield model.tokenizer
        return
    require("mlx")
    from edgespec.backends.mlx.model import load_tokenizer

    yield load_tokenizer(path)


def require(backend: BackendName) -> None:
    """Raise BackendUnavailable if `backend` cannot run here."""
    if backend == "mlx":
        from edgespec.backends.mlx.library import load_mlx

        load_mlx()


def leave_thread() -> None:
    """The last call of a thread that has owned models, after they are closed."""
    if "mlx.core" in sys.modules:
        from edgespec.backends.mlx import library

        library.leave_thread()


def prefers_mlx() -> bool:
    """Whether MLX is the faster runtime here: on Apple Silicon with mlx-lm installed."""
    return sys.platform == "darwin" and platform.machine() == "arm64" and importlib.util.find_spec("mlx_lm") is not None


def device_memory(backend: BackendName, names: Sequence[str] | None = None) -> tuple[DeviceMemory, ...]:
    """The accelerators that the runtime uses, with their free memory. `names` selects some of llama.cpp's; None: all.

    Raises BackendUnavailable, and InvalidRequest for a name that none has.
    """
    if backend == "mlx":
        from edgespec.backends.mlx.library import device, load_mlx

        gpu = device()
        free = max(0, gpu.working_set - load_mlx().get_active_memory())  # of what this process may take
        found_gpu = DeviceMemory(gpu.name, free, gpu.working_set, shares_ram=True, holds_all=True)
        return (found_gpu,) if gpu.on_gpu and gpu.working_set else ()
    if backend == "toy":
        return ()
    from edgespec.backends.llamacpp.library import library

    return tuple(
        DeviceMemory(each.name, each.free, each.total, each.kind == "igpu" or sys.platform == "darwin")
        for each in library().find_devices(names)
    )
