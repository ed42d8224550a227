"""Files that appear whole or not at all, and the file that an internal error is reported with."""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from time import time
from typing import Any

_RANDOM = "[0-9a-f]" * 8
_UNFINISHED_S = 3600.0


@contextmanager
def replace_file(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yield an empty temporary file beside `path`, which replaces `path` when the block ends without an error.

    It is removed otherwise, and so are those that processes which were killed have left. `mode`: who may use the file,
    as far as the mask of the process allows. Raises OSError if the folder cannot be written, ValueError if no
    path has this form.
    """
    remove_unfinished(path.parent.glob(f".{escape(path.name)}.{_RANDOM}"))
    partial = path.parent / f".{path.name}.{os.urandom(4).hex()}"
    partial.touch(mode, exist_ok=False)
    try:
        yield partial
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def remove_unfinished(files: Iterable[Path]) -> None:
    """Remove those of the temporary files that nobody has written to for an hour."""
    for path in files:
        with suppress(OSError):
            if time() - path.stat().st_mtime > _UNFINISHED_S:
                path.unlink(missing_ok=True)


def stat_files(files: Iterable[Path]) -> dict[Path, os.stat_result]:
    """The status of each file that is still there: other processes rename and remove files meanwhile."""
    found: dict[Path, os.stat_result] = {}
    for path in files:
        with suppress(OSError):
            found[path] = path.stat()
    return found


def remove_path(path: Path) -> None:
    """Remove a file or a folder with all that is in it, if it is there. Raises OSError."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder beside `path`, which becomes `path` when the block ends without an error.

    Only the user can read it; it is removed otherwise. Raises OSError, also if `path` is a folder with files.
    """
    partial = path.parent / f".{path.name}.{os.urandom(4).hex()}"
    partial.mkdir(mode=0o700)
    try:
        yield partial
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_atomically(path: Path, data: bytes | str, mode: int = 0o666) -> None:
    """Write `data`, text as UTF-8, so that a reader sees the old file or the new one. Raises OSError, ValueError."""
    with replace_file(path, mode) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)


def write_private(path: Path, data: bytes | str) -> None:
    """`write_atomically`, for the file's owner alone."""
    write_atomically(path, data, 0o600)


def parse_toml(data: bytes) -> dict[str, Any]:
    """The tables of a TOML file. Raises ValueError, also for one that is nested too deep for Python's parser."""
    try:
        return tomllib.loads(data.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


@contextmanager
def lock_file(path: Path, *, wait: bool, shared: bool = False) -> Iterator[None]:
    """Hold the lock of a file, which is created if missing. The system releases the lock of a process that dies. A
    `shared` lock may have several holders.

    Raises BlockingIOError if another process holds it and this one shall not wait, OSError.
    """
    import fcntl

    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def save_traceback(error: BaseException) -> Path:
    """Write the traceback of an internal error to a new file in the temporary folder; returns the file."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="edgespec-", suffix=".log", delete=False, encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    return Path(file.name)
