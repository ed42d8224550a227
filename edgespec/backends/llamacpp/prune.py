"""A model file with some of its blocks only, for drafts that skip layers; in memory where the system can."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.devices import host_memory
from edgespec.backends.llamacpp.shape import ALIGNMENT, block_of, write_header
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import BackendError, DoesNotFit
from edgespec.formats.gguf import Header, TensorInfo
from edgespec.formats.gguf_validate import read_file
from edgespec.units import gib

_CHUNK = 16 * 2**20  # bytes copied between two calls of `check`
_USE = "Use --draft ngram, or qspec."


def no_skip_reason(header: Header, kept: Sequence[int]) -> str | None:
    """Why llama.cpp cannot run this model with only the blocks `kept`, as part of a sentence; None where it can."""
    if "split.count" in header.metadata and header.integer("split.count") not in (None, 0, 1):
        return "its weights are split over several files"
    if any(tensor.name.startswith("per_layer_") for tensor in header.tensors):
        return f"the layers of {header.architecture} share tables that cannot be split"
    recurrent = {block_of(tensor) for tensor in header.tensors if ".ssm_" in tensor.name}
    attending = set(range(header.own("block_count") or 0)) - recurrent
    if recurrent and attending and not (recurrent & set(kept) and attending & set(kept)):
        return "it needs a recurrent layer and an attention layer"  # llama.cpp aborts on a hybrid with one kind only
    if tuple(kept) == tuple(range(len(kept))):
        return None
    if recurrent:
        return (
            f"llama.cpp finds the recurrent layers of {header.architecture} by number, so only the last can be skipped"
        )
    if any("sliding_window" in key for key in header.metadata):
        return f"llama.cpp finds the window layers of {header.architecture} by number, so only the last can be skipped"
    return None


@contextmanager
def prune(path: Path, kept: Sequence[int], check: CheckCancelled) -> Iterator[tuple[Path, int]]:
    """Path and bytes of a copy of the model at `path` with only the blocks `kept` (ascending); removed on exit.

    On Linux the copy is anonymous memory, which a model loaded from it keeps mapped; elsewhere it is a temporary file.
    Raises Unsupported, DoesNotFit, BackendError, Cancelled.
    """
    header = read_file(path)
    if (reason := no_skip_reason(header, kept)) is not None:
        raise Unsupported(f"{path.name} cannot skip layers: {reason}.", hint=_USE)
    number = {block: at for at, block in enumerate(kept)}
    number[-1] = -1
    tensors = [tensor for tensor in header.tensors if block_of(tensor) in number]
    needed, free = sum(tensor.nbytes for tensor in tensors), host_memory().usable
    if needed > free:
        raise DoesNotFit(
            f"a copy of {len(kept)} layers of {path.name} takes {gib(needed)}, and {gib(free)} are free.",
            hint="Skip more layers, or use --draft ngram.",
        )
    with _open_copy(path.name) as (name, file):
        try:
            with path.open("rb") as source:
                write_header(header, kept, [(_rename(t, number[block_of(t)]), t) for t in tensors], name)
                file.seek(0, os.SEEK_END)
                for tensor in tensors:
                    file.write(b"\0" * (-file.tell() % ALIGNMENT))
                    _copy(source, header.data_offset + tensor.offset, tensor.nbytes, file, check)
                file.write(b"\0" * (-file.tell() % ALIGNMENT))
            file.flush()
        except OSError as error:
            raise BackendError(
                f"a copy of {len(kept)} layers of {path.name} could not be written: {error.strerror}.",
                hint="Skip more layers, or use --draft ngram.",
            ) from error
        yield name, file.tell()


@contextmanager
def _open_copy(name: str) -> Iterator[tuple[Path, BinaryIO]]:
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create(name), "wb") as file:
            yield Path(f"/proc/self/fd/{file.fileno()}"), file
        return
    with tempfile.TemporaryDirectory(prefix="edgespec-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / name
        with path.open("wb") as file:
            yield path, file


def _rename(tensor: TensorInfo, block: int) -> str:
    if block < 0:
        return tensor.name
    return f"blk.{block}.{tensor.name.split('.', 2)[2]}"


def _copy(source: BinaryIO, start: int, size: int, to: BinaryIO, check: CheckCancelled) -> None:
    source.seek(start)
    while size:
        check()
        chunk = source.read(min(size, _CHUNK))
        if not chunk:
            raise OSError(0, "the file became shorter while it was read")
        to.write(chunk)
        size -= len(chunk)
