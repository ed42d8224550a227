"""A model file without some of its blocks, held in memory where the system can, for drafts that skip layers."""

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

_CHUNK = 16 * 2**20  # bytes copied between two looks at `check`
_USE = "Use --draft ngram, or qspec."


def refusal(header: Header, kept: Sequence[int]) -> str | None:
    """Why llama.cpp cannot run this model with the blocks `kept` alone, as part of a sentence; None where it can."""
    if "split.count" in header.metadata and header.integer("split.count") not in (None, 0, 1):
        return "its weights come in several files"
    if any(tensor.name.startswith("per_layer_") for tensor in header.tensors):
        return f"the layers of {header.architecture} share tables that cannot be cut"
    recurrent = {block_of(tensor) for tensor in header.tensors if ".ssm_" in tensor.name}
    attending = set(range(header.own("block_count") or 0)) - recurrent
    if recurrent and attending and not (recurrent & set(kept) and attending & set(kept)):
        return (
            "it needs both a recurrent layer and one that attends"  # llama.cpp aborts where a hybrid has but one kind
        )
    if tuple(kept) == tuple(range(len(kept))):
        return None
    if recurrent:
        return f"which layers of {header.architecture} are recurrent goes by their numbers, so only the last can be cut"
    if any("sliding_window" in key for key in header.metadata):
        return f"which layers of {header.architecture} see a window goes by their numbers, so only the last can be cut"
    return None


@contextmanager
def pruned(path: Path, kept: Sequence[int], check: CheckCancelled) -> Iterator[tuple[Path, int]]:
    """Path and bytes of a model with the blocks `kept` (ascending) of the one at `path`, for as long as it is loaded.

    On Linux it is memory that the loaded model maps; elsewhere a temporary file. Raises Unsupported, BackendError.
    """
    header = read_file(path)
    if (reason := refusal(header, kept)) is not None:
        raise Unsupported(f"{path.name} cannot skip layers: {reason}.", hint=_USE)
    number = {block: at for at, block in enumerate(kept)}
    number[-1] = -1
    tensors = [tensor for tensor in header.tensors if block_of(tensor) in number]
    needed, free = sum(tensor.nbytes for tensor in tensors), host_memory().usable
    if needed > free:
        raise DoesNotFit(
            f"{len(kept)} layers of {path.name} take {gib(needed)} of their own, and {gib(free)} are free.",
            hint="Skip more layers, or use --draft ngram.",
        )
    with _unnamed(path.name) as (name, file):
        try:
            with path.open("rb") as source:
                write_header(header, kept, [(_renamed(t, number[block_of(t)]), t) for t in tensors], name)
                file.seek(0, os.SEEK_END)
                for tensor in tensors:
                    file.write(b"\0" * (-file.tell() % ALIGNMENT))
                    _copy(source, header.data_offset + tensor.offset, tensor.nbytes, file, check)
                file.write(b"\0" * (-file.tell() % ALIGNMENT))
            file.flush()
        except OSError as error:
            raise BackendError(
                f"there is no room for a copy of {len(kept)} layers of {path.name}: {error.strerror}.",
                hint="Skip more layers, or use --draft ngram.",
            ) from error
        yield name, file.tell()


@contextmanager
def _unnamed(name: str) -> Iterator[tuple[Path, BinaryIO]]:
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create(name), "wb") as file:
            yield Path(f"/proc/self/fd/{file.fileno()}"), file
        return
    with tempfile.TemporaryDirectory(prefix="edgespec-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / name
        with path.open("wb") as file:
            yield path, file


def _renamed(tensor: TensorInfo, block: int) -> str:
    if block < 0:
        return tensor.name
    return f"blk.{block}.{tensor.name.split('.', 2)[2]}"


def _copy(source: BinaryIO, start: int, size: int, to: BinaryIO, check: CheckCancelled) -> None:
    source.seek(start)
    while size:
        check()
        chunk = source.read(min(size, _CHUNK))
        if not chunk:
            raise OSError(0, "the file has been cut since it was opened")
        to.write(chunk)
        size -= len(chunk)
