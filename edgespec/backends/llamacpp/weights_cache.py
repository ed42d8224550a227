"""The folder in which a worker keeps weights that it was sent, so that they are sent once."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from edgespec.files import stat_files

_MARK = ".client"
_SPARE_BYTES = 256 * 2**20  # free bytes on the disk; with fewer, a file may have been cut off


class WeightsCache:
    """Files written by llama.cpp, which takes them later without a check.

    So the files of a client are removed if its connection did not end in order, or the disk was full: the last of
    them may be incomplete. A mark in the folder says from when on.
    """

    def __init__(self, folder: Path) -> None:
        """Make the folder, or clean it after a worker that was killed. Raises OSError."""
        self.folder = folder
        self._mark = folder / _MARK
        folder.mkdir(parents=True, exist_ok=True)
        if self._mark.exists():
            self._drop_new()

    @property
    def size(self) -> int:
        return sum(found.st_size for found in stat_files(self.folder.iterdir()).values())

    def begin(self) -> None:
        """A client has come. Raises OSError."""
        self._mark.touch()

    def end(self) -> None:
        """The client has gone, and llama.cpp writes nothing more for it."""
        if shutil.disk_usage(self.folder).free < _SPARE_BYTES:
            self._drop_new()
        self._mark.unlink(missing_ok=True)

    def _drop_new(self) -> None:
        """Remove the files since the mark, and the mark."""
        since = self._mark.stat().st_mtime_ns
        for path, found in stat_files(self.folder.iterdir()).items():
            if found.st_mtime_ns >= since:
                with suppress(OSError):
                    path.unlink()
