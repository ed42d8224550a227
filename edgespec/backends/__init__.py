"""Runtimes behind one contract, by name; each is imported when a model of it is opened, not before."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Literal, Protocol

from edgespec.backends.attached_draft import SelfDraftModel, SelfDraftSpec
from edgespec.backends.devices import DeviceMemory
from edgespec.backends.options import LoadOptions
from edgespec.core.arrays import Logits
from edgespec.core.batching import Yield
from edgespec.core.protocols import CheckCancelled, Session
from edgespec.text.tokenizer import Tokenizer

BackendName = Literal["llamacpp", "mlx", "toy"]


class Embedder(Protocol):
    """Texts to vectors, beside the sessions of a model."""

    def embed(self, tokens: Sequence[int]) -> Generator[Yield, None, Logits]:
        """[width] of length 1, for at least one token and no more than the context holds. Raises Cancelled,
        BackendError, ValueError for ids that the model does not have.
        """

    def close(self) -> None: ...


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
        """Why its sessions do not take trees, as part of a sentence; None where they do."""

    @property
    def description(self) -> str:
        """Architecture, size and quantization, for people."""

    @property
    def no_batching_reason(self) -> str | None:
        """Why shared sessions do not do their forwards as one, so that answers are made one after the other; None where
        they do.
        """

    def open_session(self, check: CheckCancelled, *, shared: bool = False) -> Session:
        """A session that polls `check` while it computes. Of `shared` ones there may be as many as its options have
        caches.
        """

    def open_embedder(self, cells: int, check: CheckCancelled) -> Embedder:
        """What makes vectors of texts of at most `cells` tokens. Raises InvalidRequest where this runtime does not,
        BackendError.
        """

    @property
    def layer_count(self) -> int: ...

    def self_draft(
        self, method: SelfDraftSpec, *, folder: Path, progress: Callable[[float], None], check: CheckCancelled
    ) -> SelfDraftModel:
        """What it takes to draft for itself by `method`, whose layers are known. What takes long to make is kept in
        `folder`. `progress` gets 0.0 to 1.0. Raises Refused, InvalidRequest, BackendError, CacheError, Cancelled.
        """

    def close(self) -> None:
        """Free the weights; sessions are closed before."""


def open_model(
    backend: BackendName,
    path: Path,
    options: LoadOptions,
    *,
    progress: Callable[[float], None],
    check: CheckCancelled,
) -> Model:
    """Load a checked model file. `progress` gets 0.0 to 1.0.

    Raises BackendUnavailable, InvalidModelFile, BackendError, Cancelled.
    """
    if backend == "llamacpp":
        from edgespec.backends.llamacpp.model import load

        return load(path, options, progress=progress, check=check)
    if backend == "toy":
        from edgespec.backends.toy.model import load as load_toy

        return load_toy(path.name, options)
    require("mlx")
    from edgespec.backends.mlx.model import load as load_mlx

    return load_mlx(path, options, progress=progress, check=check)


def require(backend: BackendName) -> None:
    """Raise BackendUnavailable, with what to do, if `backend` cannot run here."""
    if backend == "mlx":
        from edgespec.backends.mlx.library import load_mlx

        load_mlx()


def leave_thread() -> None:
    """Whoever owned models on a thread of its own calls this last on it, after they are closed."""
    if "mlx.core" in sys.modules:
        from edgespec.backends.mlx import library

        library.leave_thread()


def prefers_mlx() -> bool:
    """Whether MLX is the faster runtime here: on Apple Silicon, where mlx-lm is installed."""
    return sys.platform == "darwin" and platform.machine() == "arm64" and importlib.util.find_spec("mlx_lm") is not None


def device_memory(backend: BackendName) -> tuple[DeviceMemory, ...]:
    """Accelerators that the runtime would use, with their free memory. Raises BackendUnavailable."""
    if backend == "mlx":
        from edgespec.backends.mlx.library import device

        found = device()
        size = found.working_set
        return (DeviceMemory(found.name, size, size, shares_ram=True, holds_all=True),) if found.on_gpu and size else ()
    if backend == "toy":
        return ()
    from edgespec.backends.llamacpp.library import library

    return tuple(
        DeviceMemory(device.name, device.free, device.total, device.kind == "igpu" or sys.platform == "darwin")
        for device in library().devices()
        if device.kind in ("gpu", "igpu")
    )
