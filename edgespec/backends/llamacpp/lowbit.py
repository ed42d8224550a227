"""Low-bit copies of a model for its own drafts: each made once, in a process of its own, and cached on disk."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.isolated import ChildDied, run_in_child
from edgespec.backends.llamacpp.quantize import quantize
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import BackendError, CacheError
from edgespec.formats.gguf import Header
from edgespec.formats.gguf_validate import read_file

MAX_CACHE_BYTES = 40 * 2**30  # of all copies; the least recently used are removed first
_SPARE_BYTES = 512 * 2**20  # left free on the disk
_MAX_OVERHEAD_BITS = 1.5  # a weight, for scales and for tensors of larger types
_TYPES = {2: "Q2_K", 3: "Q3_K_M", 4: "Q4_0", 5: "Q5_K_M", 6: "Q6_K"}  # none needs an importance matrix


def mean_bits(header: Header) -> float:
    """Bits a weight, over all tensors."""
    return 8 * header.weight_bytes / _weights(header)


def _weights(header: Header) -> int:
    return sum(math.prod(tensor.shape) for tensor in header.tensors)


def low_bit_copy(path: Path, bits: int, folder: Path, progress: Callable[[float], None], check: CheckCancelled) -> Path:
    """A copy of the model at `path` with weights of `bits` bits (0: about half of its own), made if there is none.

    A copy gets its final name when it is complete. Raises Unsupported, CacheError, BackendError, Cancelled.
    """
    header = read_file(path)
    if (header.integer("split.count") or 1) > 1:
        raise Unsupported(
            f"{path.name} is one of several files of a model, which cannot be requantized.", hint="Use layerskip."
        )
    own_bits = mean_bits(header)
    bits = bits or max(2, min(4, int(own_bits / 2 + 0.25)))
    if bits + 0.5 >= own_bits:
        raise Unsupported(
            f"{path.name} has only {own_bits:.1f} bits a weight, and the draft was to have {bits}.",
            hint="Use fewer bits, or layerskip.",
        )
    copy = folder / f"{path.stem}-{_TYPES[bits].lower()}.gguf"
    if copy.exists():
        with suppress(OSError):
            copy.touch()  # the least recently used copy is removed first
        return copy
    needed = int(_weights(header) * (bits + _MAX_OVERHEAD_BITS) / 8)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        evict(folder.parent, MAX_CACHE_BYTES - needed)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise CacheError(f"cannot write to {folder}: {error.strerror}.", hint="Set EDGESPEC_CACHE_DIR.") from error
    if free < needed + _SPARE_BYTES:
        raise CacheError(
            f"a {bits}-bit copy of {path.name} takes {needed / 2**30:.1f} GiB, and {folder} has "
            f"{free / 2**30:.1f} GiB free.",
            hint="Free some disk space, set EDGESPEC_CACHE_DIR, or use --draft layerskip.",
        )

    def report() -> None:
        written = max((p.stat().st_size for p in folder.glob(f".{copy.name}.*")), default=0)
        progress(min(1.0, written / needed))

    try:
        run_in_child(quantize, path, copy, _TYPES[bits], check=check, on_poll=report)
    except ChildDied:
        raise BackendError(
            f"llama.cpp could not make a {bits}-bit copy of {path.name}.",
            hint="Check that the disk has space, or use --draft layerskip.",
        ) from None
    finally:
        remove_partials(folder)
    return copy


def copies(root: Path) -> list[Path]:
    """Every complete copy below `root`, the most recently used first."""
    return sorted(root.glob("*/*.gguf"), key=lambda copy: copy.stat().st_mtime, reverse=True)


def evict(root: Path, limit: int) -> None:
    """Remove the least recently used copies until the rest take at most `limit` bytes."""
    total = 0
    for copy in copies(root):
        total += copy.stat().st_size
        if total > limit:
            copy.unlink(missing_ok=True)


def remove_partials(folder: Path) -> None:
    """Remove incomplete copies of interrupted builds."""
    for partial in folder.glob(".*.gguf.*"):
        with suppress(OSError):
            partial.unlink()
