"""Transparent huge pages on Linux for the large buffers that a runtime has allocated and not filled yet.

In pages of 4 KiB, weights that are read once a forward need far more address translations than a processor keeps. The
kernel gives anonymous memory huge pages always, only if asked with madvise(2), or never. Mapped files are left
alone. docs/benchmarks.md has the gain; `python -m benchmarks.environment` measures it.
"""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import suppress
from pathlib import Path

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_MAPS = Path("/proc/self/maps")
_MADV_HUGEPAGE = 14
_MIN_BYTES = 16 * 2**20  # more than a thread's stack, usually 8 MiB
_ANONYMOUS = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ \S+ *$", re.MULTILINE)  # no file's path, no [heap]


def read_mode(folder: Path = HUGE_PAGES) -> str | None:
    """The kernel's mode, 'always', 'madvise' or 'never'; None if it has no transparent huge pages."""
    with suppress(OSError):
        if chosen := re.search(r"\[(\w+)\]", (folder / "enabled").read_text(encoding="ascii")):
            return chosen[1]
    return None


def is_set_by_user() -> bool:
    """Whether GLIBC_TUNABLES decides about huge pages; that setting is left as it is."""
    return "glibc.malloc.hugetlb=" in os.environ.get("GLIBC_TUNABLES", "")


class NewMemory:
    """The anonymous memory that this process maps after this object was made."""

    def __init__(self) -> None:
        self._before = _read_anonymous()

    def advise(self) -> None:
        """Ask for huge pages in its parts of 16 MiB and more, if the kernel waits to be asked. Never fails."""
        if read_mode() != "madvise" or is_set_by_user():
            return
        libc = ctypes.CDLL(None)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for low, high in _read_anonymous() - self._before:
            start, end = int(low, 16), int(high, 16)
            if end - start >= _MIN_BYTES:
                libc.madvise(start, end - start, _MADV_HUGEPAGE)


def _read_anonymous() -> set[tuple[bytes, bytes]]:
    """Start and end of this process' private anonymous mappings that can be written; none but on Linux."""
    with suppress(OSError):
        return set(_ANONYMOUS.findall(_MAPS.read_bytes()))
    return set()
