"""SQLite files that several processes share: how they are opened, checked, and set aside where they are damaged."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from edgespec.errors import CacheError, reason_of

_ELSEWHERE = "or set EDGESPEC_DATA_DIR to another folder."


class DamagedFile(Exception):
    """The file is not a valid database of this program."""


def open_database(
    path: Path, version: int, prepare: Callable[[sqlite3.Connection], None], wait_s: float, *, any_thread: bool = False
) -> tuple[sqlite3.Connection, str | None]:
    """A connection to the file at `path`, created if missing, and a notice if a damaged file was set aside.

    `prepare` configures the connection and creates the tables of a new file, whose `read_version` is 0; it raises
    DamagedFile for tables that are not of this program. `version` is the latest that it can read. `any_thread`: the
    caller has a lock of its own. Raises CacheError.
    """

    def connect() -> sqlite3.Connection:
        return _connect(path, version, prepare, wait_s, any_thread)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path, wait_s):
            try:
                return connect(), None
            except DamagedFile as damage:
                moved = _set_aside(path)
                notice = f"{path} is damaged ({damage}). It is renamed to {moved.name}, and a new file is used."
                return connect(), notice
    except (OSError, sqlite3.Error, DamagedFile) as error:
        raise to_cache_error(error, path) from error


def read_version(db: sqlite3.Connection) -> int:
    """PRAGMA user_version."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def require_columns(db: sqlite3.Connection, columns: dict[str, str]) -> None:
    """Raises DamagedFile where a table lacks one of its columns, which are separated by commas."""
    try:
        for table, names in columns.items():
            db.execute(f"SELECT {names} FROM {table} LIMIT 0")
    except sqlite3.OperationalError as error:
        if _error_code(error) != sqlite3.SQLITE_ERROR:
            raise
        raise DamagedFile(reason_of(error)) from error


def to_cache_error(error: Exception, path: Path) -> CacheError:
    """The CacheError for an error of the file at `path`."""
    code = _error_code(error)
    if code == sqlite3.SQLITE_FULL:
        return CacheError(f"{path} cannot be written: the disk is full.", hint=f"Free some space, {_ELSEWHERE}")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return CacheError(f"{path} is locked by another process.", hint=f"Wait for it or stop it, {_ELSEWHERE}")
    if _is_damage(error):
        return CacheError(
            f"{path} is damaged: {reason_of(error)}.", hint="Restart edgespec: a damaged file is set aside."
        )
    reason = (getattr(error, "strerror", None) or reason_of(error)).rstrip(".")
    hint = f"Check the permissions of the folder and the disk, {_ELSEWHERE}"
    return CacheError(f"{path} cannot be read or written: {reason}.", hint=hint)


def _connect(
    path: Path, version: int, prepare: Callable[[sqlite3.Connection], None], wait_s: float, any_thread: bool
) -> sqlite3.Connection:
    path.touch(mode=0o600)  # SQLite gives its other files the same permissions
    log = Path(f"{path}-wal")
    if path.stat().st_size == 0 and log.exists() and log.stat().st_size:
        raise DamagedFile("it is empty, but its log is not")  # SQLite would treat it as a new file and delete the log
    db = sqlite3.connect(path, timeout=wait_s, isolation_level=None, check_same_thread=not any_thread)
    try:
        if read_version(db) > version:
            hint = f"Update edgespec, {_ELSEWHERE}"
            raise CacheError(f"{path} was written by a newer version of edgespec.", hint=hint)
        found = str(db.execute("PRAGMA integrity_check(1)").fetchone()[0])
        if found != "ok":
            raise DamagedFile(" ".join(found.split()))
        if read_version(db) == 0 and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise DamagedFile("it belongs to another program")
        prepare(db)
        db.execute("PRAGMA journal_mode = WAL")
    except BaseException as error:
        db.close()
        if _is_damage(error):
            raise DamagedFile(reason_of(error)) from error
        raise
    return db


def _error_code(error: BaseException) -> int:
    """SQLite's primary result code of an error; 0 without one."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _is_damage(error: BaseException) -> bool:
    return _error_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@contextmanager
def _lock(path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock under which one process creates the file or sets it aside."""
    lock_path = Path(f"{path}.lock")
    lock_path.touch(mode=0o600)
    with closing(sqlite3.connect(lock_path, timeout=wait_s, isolation_level=None)) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        yield


def _set_aside(path: Path) -> Path:
    """Rename the file and SQLite's files of it to the first free name."""
    number = 1
    while (moved := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    for suffix in ("-wal", "-shm", ""):
        with suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{moved}{suffix}")
    return moved
