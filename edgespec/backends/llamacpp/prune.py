"""A model file with some of its blocks only, for drafts that skip layers; in memory if the system can."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.rewrite import count_blocks, write_blocks
from edgespec.cancel import check_cancelled
from edgespec.errors import BackendError, DoesNotFit
from edgespec.formats.gguf import Header, TensorInfo
from edgespec.formats.gguf_validate import read_file
from edgespec.machines.memory import host_memory
from edgespec.units import gib

_USE = "Use --draft ngram, or qspec."


@dataclass(frozen=True, slots=True)
class Part:
    """A copy of a model with some of its blocks. `has_equal_blocks`: all blocks of the model have the same tensors."""

    path: Path
    nbytes: int
    has_equal_blocks: bool


def no_skip_reason(header: Header, kept: Sequence[int]) -> str | None:
    """Why a file with only the blocks `kept` would be another model, as part of a sentence; None if it is not.

    The copy keeps the kinds of blocks that arrays of the metadata state. If there is no array, llama.cpp computes
    the kind from the number.
    """
    architecture = header.architecture
    has_gap = tuple(kept) != tuple(range(len(kept)))
    by_number = f"layers of {architecture} by number, so only the last can be skipped"
    has_windows = any("sliding_window" in key for key in header.metadata)
    states_windows = _states_blocks(header, "attention.sliding_window_pattern")
    states_recurrent = _states_blocks(header, "attention.recurrent_layers") or 0 in (
        header.per_block("attention.head_count_kv") or ()
    )
    reasons: dict[str, object] = {
        "its weights are split over several files": (header.integer("split.count") or 1) > 1,
        f"the layers of {architecture} share tables that cannot be split": any(
            tensor.name.startswith("per_layer_") for tensor in header.tensors
        ),
        f"llama.cpp finds the recurrent {by_number}": has_gap and _is_hybrid(header) and not states_recurrent,
        f"llama.cpp finds the window {by_number}": has_gap and has_windows and not states_windows,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _states_blocks(header: Header, key: str) -> bool:
    """Whether the metadata has an array of values of the blocks."""
    return isinstance(header.metadata.get(f"{header.architecture}.{key}"), np.ndarray)


def _is_hybrid(header: Header) -> bool:
    recurrent = {tensor.block for tensor in header.tensors if ".ssm_" in tensor.name}
    has_interval = f"{header.architecture}.full_attention_interval" in header.metadata
    return has_interval or 0 < len(recurrent) < count_blocks(header)


def _has_equal_blocks(header: Header) -> bool:
    """Whether each block has tensors of the same names and shapes."""
    found: dict[int, set[tuple[str, tuple[int, ...]]]] = {block: set() for block in range(count_blocks(header))}
    for tensor in header.tensors:
        if tensor.block in found:
            found[tensor.block].add((tensor.name.split(".", 2)[2], tensor.shape))
    return len(set(map(frozenset, found.values()))) == 1


@contextmanager
def prune(path: Path, kept: Sequence[int]) -> Iterator[Part]:
    """A copy of the model at `path` with only the blocks `kept` (ascending); removed on exit.

    On Linux the copy is anonymous memory, which a model loaded from it keeps mapped; elsewhere it is a temporary file.
    Raises Unsupported, DoesNotFit, BackendError, Cancelled.
    """
    header = read_file(path)
    if (reason := no_skip_reason(header, kept)) is not None:
        raise Unsupported(f"{path.name} cannot skip layers: {reason}.", hint=_USE)
    needed = sum(tensor.nbytes for tensor in header.tensors if tensor.block in (-1, *kept))
    if needed > (free := host_memory().usable):
        raise DoesNotFit(
            f"a copy of {len(kept)} layers of {path.name} takes {gib(needed)}, and {gib(free)} are free.",
            hint="Skip more layers, or use --draft ngram.",
        )

    def read(tensor: TensorInfo) -> npt.NDArray[np.uint8]:
        check_cancelled()
        data = np.fromfile(path, np.uint8, tensor.nbytes, offset=header.data_offset + tensor.offset)
        if len(data) < tensor.nbytes:
            raise OSError(0, "the file became shorter while it was read")
        return data

    with _open_copy(path.name) as copy:
        try:
            write_blocks(header, kept, copy, read)
            part = Part(copy, copy.stat().st_size, _has_equal_blocks(header))
        except OSError as error:
            raise BackendError(
                f"a copy of {len(kept)} layers of {path.name} could not be written: {error.strerror}.",
                hint="Skip more layers, or use --draft ngram.",
            ) from error
        yield part


@contextmanager
def _open_copy(name: str) -> Iterator[Path]:
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create(name), "wb") as file:
            yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")  # other processes can open it too
        return
    with tempfile.TemporaryDirectory(prefix="edgespec-", ignore_cleanup_errors=True) as folder:
        yield Path(folder) / name
