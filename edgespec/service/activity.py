"""A lock that every engine of this user holds while it works, so that other work on the machine can wait.

The system releases it when a process ends, in whatever way. It protects nothing: what fails here is ignored.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from edgespec.controller.store import calibration_folder


def activity_path() -> Path:
    """The file that is locked, in the cache folder."""
    return calibration_folder().parent / "working.lock"


class Activity:
    """One engine's share of the lock."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: that of `activity_path` if None."""
        self._path = path or activity_path()
        self._file: int | None = None

    def set(self, is_working: bool) -> None:
        """Take the lock, or release it. Never waits."""
        if self._file is None and not is_working:
            return
        with suppress(OSError):  # one who looks holds it for a moment, and this engine's work is not seen
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB if is_working else fcntl.LOCK_UN)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def is_any_engine_working(path: Path | None = None) -> bool:
    """Whether an engine of this user loads a model, reads a prompt or answers now; False where that is not known."""
    with suppress(OSError):
        file = os.open(path or activity_path(), os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
    return False
