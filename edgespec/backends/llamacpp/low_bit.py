"""Low-bit copies of a model for its own drafts: each made once, in a process of its own, and cached on disk."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import sleep

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.quantize import quantize
from edgespec.cancel import check_cancelled
from edgespec.errors import BackendError, CacheError
from edgespec.files import lock_file, stat_files
from edgespec.formats.gguf_validate import read_file
from edgespec.isolated import ChildDied, run_in_child
from edgespec.progress import report_loaded

MAX_CACHE_BYTES = 40 * 2**30  # of all copies; the least recently used are removed first
_SPARE_BYTES = 512 * 2**20  # left free on the disk
_MAX_OVERHEAD_BITS = 1.5  # a weight, for scales and for tensors of larger types
_LOOK_S = 0.2  # between two looks at what another process does
_TYPES = {2: "Q2_K", 3: "Q3_K_M", 4: "Q4_0", 5: "Q5_K_M", 6: "Q6_K"}  # none needs an importance matrix


def low_bit_copy(path: Path, bits: int, folder: Path) -> Path:
    """A copy of the model at `path` with weights of `bits` bits (0: about half of its own), made if there is none.

    A copy gets its final name when it is complete. Raises Unsupported, CacheError, BackendError, Cancelled.
    """
    header = read_file(path)
    if (header.integer("split.count") or 1) > 1:
        raise Unsupported(
            f"{path.name} is one of several files of a model, which cannot be requantized.", hint="Use layerskip."
        )
    weights = sum(math.prod(tensor.shape) for tensor in header.tensors)
    own_bits = 8 * header.weight_bytes / weights
    bits = bits or max(2, min(4, int(own_bits / 2 + 0.25)))
    if bits + 0.5 >= own_bits:
        raise Unsupported(
            f"{path.name} has only {own_bits:.1f} bits a weight, and the draft was to have {bits}.",
            hint="Use fewer bits, or layerskip.",
        )
    copy = folder / f"{path.stem}-{_TYPES[bits].lower()}.gguf"
    needed = int(weights * (bits + _MAX_OVERHEAD_BITS) / 8)
    try:
        if not copy.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with _alone_in(folder):
                if not copy.exists():
                    _make_copy(path, bits, copy, needed)
        with suppress(OSError):
            copy.touch()  # the least recently used copy is removed first
    except OSError as error:
        raise CacheError(f"cannot write to {folder}: {error.strerror}.", hint="Set EDGESPEC_CACHE_DIR.") from error
    return copy


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Waits until no other process makes a copy in `folder`. Raises Cancelled, OSError."""
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(lock_file(folder / "lock", wait=False))
                break
            except BlockingIOError:
                check_cancelled()
                sleep(_LOOK_S)
        yield


def _make_copy(path: Path, bits: int, copy: Path, needed: int) -> None:
    """Raises CacheError, BackendError, Cancelled, OSError."""
    folder, unfinished = copy.parent, f".{copy.name}.*"
    evict(folder.parent, MAX_CACHE_BYTES - needed)
    free = shutil.disk_usage(folder).free
    if free < needed + _SPARE_BYTES:
        raise CacheError(
            f"a {bits}-bit copy of {path.name} takes {needed / 2**30:.1f} GiB, and {folder} has "
            f"{free / 2**30:.1f} GiB free.",
            hint="Free some disk space, set EDGESPEC_CACHE_DIR, or use --draft layerskip.",
        )

    def report() -> None:
        written = max((found.st_size for found in stat_files(folder.glob(unfinished)).values()), default=0)
        report_loaded(min(1.0, written / needed))

    try:
        run_in_child(quantize, path, copy, _TYPES[bits], on_poll=report)
    except ChildDied:
        raise BackendError(
            f"llama.cpp could not make a {bits}-bit copy of {path.name}.",
            hint="Check that the disk has space, or use --draft layerskip.",
        ) from None
    finally:
        for file in folder.glob(unfinished):  # of a build that was interrupted
            file.unlink(missing_ok=True)


def evict(root: Path, limit: int) -> None:
    """Remove the least recently used copies until the rest take at most `limit` bytes."""
    total = 0
    copies = stat_files(root.glob("*/*.gguf"))
    for copy in sorted(copies, key=lambda copy: copies[copy].st_mtime, reverse=True):
        total += copies[copy].st_size
        if total > limit:
            copy.unlink(missing_ok=True)
