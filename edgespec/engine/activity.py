"""A lock that engines hold while they work, so that other work can wait."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path

from edgespec.autopilot.store import calibration_folder
from edgespec.files import lock_file


def activity_path() -> Path:
    """The file that is locked, in the cache folder."""
    return calibration_folder().parent / "working.lock"


class Activity:
    """One engine's share of a lock that engines of this user hold while they work, so that other work can wait.

    The system releases it when a process ends, in whatever way. It protects nothing: what fails here is ignored.
    """

    def __init__(self, path: Path | None = None) -> None:
        """`path`: that of `activity_path` if None."""
        self._path = path or activity_path()
        self._held = ExitStack()

    def set(self, is_working: bool) -> None:
        """Take the lock, or release it. Never waits."""
        with suppress(OSError):  # `is_any_engine_working` holds it for a moment; this engine's work is not seen then
            self._held.close()
            if is_working:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._held.enter_context(lock_file(self._path, wait=False, shared=True))


def is_any_engine_working(path: Path | None = None) -> bool:
    """Whether an engine of this user loads a model, reads a prompt or answers now; False if that is not known."""
    try:
        with lock_file(path or activity_path(), wait=False):
            return False
    except OSError as error:
        return isinstance(error, BlockingIOError)
