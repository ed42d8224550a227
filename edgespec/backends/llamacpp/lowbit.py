"""Low-bit copies of a model for its own drafts: made once in a process of their own, kept in a folder of known size."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.isolated import ChildDied, in_child
from edgespec.backends.llamacpp.quantize import quantize
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import BackendError, CacheError
from edgespec.formats.gguf import Header
from edgespec.formats.gguf_validate import read_file

KEPT_BYTES = 40 * 2**30  # of low-bit copies in all; the ones used longest ago make room
_SPARE_BYTES = 512 * 2**20  # left free on the disk
_OVER = 1.5  # bits a weight that scales, and tensors of better types, take at most
_TYPES = {2: "Q2_K", 3: "Q3_K_M", 4: "Q4_0", 5: "Q5_K_M", 6: "Q6_K"}  # none needs an importance matrix


def bits_of(header: Header) -> float:
    """Mean bits of a weight."""
    return 8 * header.weight_bytes / _weights(header)


def _weights(header: Header) -> int:
    return sum(math.prod(tensor.shape) for tensor in header.tensors)


def low_bit(path: Path, bits: int, folder: Path, progress: Callable[[float], None], check: CheckCancelled) -> Path:
    """A copy of the model at `path` with weights of `bits` bits (0: about half), made if there is none.

    A copy appears under its name only when it is whole. Raises Unsupported, CacheError, BackendError, Cancelled.
    """
    header = read_file(path)
    if (header.integer("split.count") or 1) > 1:
        raise Unsupported(f"{path.name} is one of several files, which are not requantized.", hint="Use layerskip.")
    has = bits_of(header)
    bits = bits or max(2, min(4, int(has / 2 + 0.25)))
    if bits + 0.5 >= has:
        raise Unsupported(
            f"{path.name} has {has:.1f} bits a weight; {bits} are not fewer.", hint="Use fewer, or layerskip."
        )
    copy = folder / f"{path.stem}-{_TYPES[bits].lower()}.gguf"
    if copy.exists():
        with suppress(OSError):
            copy.touch()  # used now
        return copy
    needed = int(_weights(header) * (bits + _OVER) / 8)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        make_room(folder.parent, KEPT_BYTES - needed)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise CacheError(f"cannot write to {folder}: {error.strerror}.", hint="Set EDGESPEC_CACHE_DIR.") from error
    if free < needed + _SPARE_BYTES:
        raise CacheError(
            f"a copy of {path.name} with {bits} bits takes {needed / 2**30:.1f} GiB, and {folder} has "
            f"{free / 2**30:.1f} GiB free.",
            hint="Free some disk space, set EDGESPEC_CACHE_DIR, or use --draft layerskip.",
        )

    def done() -> None:
        written = max((p.stat().st_size for p in folder.glob(f".{copy.name}.*")), default=0)
        progress(min(1.0, written / needed))

    try:
        in_child(quantize, path, copy, _TYPES[bits], check=check, meanwhile=done)
    except ChildDied:
        raise BackendError(
            f"llama.cpp could not make a {bits}-bit copy of {path.name}.",
            hint="Check that the disk has room, or use --draft layerskip.",
        ) from None
    finally:
        sweep(folder)  # what a build that was stopped has left
    return copy


def copies(root: Path) -> list[Path]:
    """Every whole copy below `root`, the one used last first."""
    return sorted(root.glob("*/*.gguf"), key=lambda copy: copy.stat().st_mtime, reverse=True)


def make_room(root: Path, limit: int) -> None:
    """Remove copies until they take `limit` bytes at most."""
    total = 0
    for copy in copies(root):
        total += copy.stat().st_size
        if total > limit:
            copy.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what a build that was interrupted has left."""
    for partial in folder.glob(".*.gguf.*"):
        with suppress(OSError):
            partial.unlink()
