"""SQLite files that several processes share: how they are opened, checked, and set aside if they are damaged."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, Self

from edgespec.errors import CacheError, reason_of
from edgespec.files import lock_file

_ELSEWHERE = "or set EDGESPEC_DATA_DIR to another folder."
_LEAST_FREE = 2**16  # bytes; SQLite's files beside a database take 32 KiB at once
IN_MEMORY = Path(":memory:")


class DamagedFile(Exception):
    """The file is not a valid database of this program."""


class Layout(NamedTuple):
    """The latest version of a file that can be read.

    pragmas     of each connection
    statements  they bring an empty file, or one of an earlier version, to this one
    """

    version: int
    pragmas: tuple[str, ...]
    statements: tuple[str, ...]


class SharedDatabase:
    """The connection to a file that other processes use too; any thread may use it. Every method raises CacheError.

    `notice` is a sentence about a damaged file that was set aside, else None.
    """

    def __init__(self, path: Path, layout: Layout, wait_s: float = 0.0) -> None:
        """Open the file at `path`, which is created if missing; waits up to `wait_s` for locks.

        Replaces a damaged file by a new one and keeps the old under another name. IN_MEMORY is a path too.
        """
        self.file = path
        self.notice: str | None = None
        self._layout = layout
        self._wait_s = wait_s
        self._lock = threading.RLock()
        try:
            self._db = self._connect() if self.is_in_memory else self._open()
        except (OSError, sqlite3.Error, UnicodeDecodeError, DamagedFile) as error:
            raise to_cache_error(error, path) from error

    @property
    def is_in_memory(self) -> bool:
        """Whether everything is lost when the program ends."""
        return self.file == IN_MEMORY

    def connect_again(self) -> Self:
        """Another connection to the file, so that a thread does not wait for the transactions of this one.

        Raises CacheError.
        """
        other = copy(self)
        other.notice, other._lock = None, threading.RLock()
        try:
            other._db = self._connect_unchecked()
            self._set_pragmas(other._db)
        except sqlite3.Error as error:
            raise to_cache_error(error, self.file) from error
        return other

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._db
            except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
                raise to_cache_error(error, self.file) from error

    def query(self, statement: str, *parameters: object) -> list[Any]:
        with self.read() as db:
            return db.execute(statement, parameters).fetchall()

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """The connection in a transaction; an exception undoes it. One process at a time writes."""
        with self.read() as db:
            db.execute("BEGIN IMMEDIATE")
            with db:
                yield db

    def _open(self) -> sqlite3.Connection:
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with lock_file(Path(f"{self.file}.lock"), wait=True):  # one process creates the file or sets it aside
            try:
                return self._connect()
            except DamagedFile as damage:
                moved = _set_aside(self.file)
                self.notice = (
                    f"{self.file} is damaged ({damage}). It is renamed to {moved.name}, and a new file is used."
                )
                return self._connect()

    def _connect(self) -> sqlite3.Connection:
        if not self.is_in_memory:
            self.file.touch(mode=0o600)  # SQLite gives its other files the same permissions
            log = Path(f"{self.file}-wal")
            if self.file.stat().st_size == 0 and log.exists() and log.stat().st_size:
                # SQLite would treat it as a new file and delete the log
                raise DamagedFile("it is empty, but its log is not")
        db = self._connect_unchecked()
        try:
            self._prepare(db)
        except BaseException as error:
            db.close()
            if _is_damage(error):
                raise DamagedFile(reason_of(error)) from error
            raise
        return db

    def _connect_unchecked(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.file, timeout=self._wait_s, isolation_level=None, check_same_thread=False)
        db.text_factory = lambda data: data.decode("utf-8", "replace")
        return db

    def _set_pragmas(self, db: sqlite3.Connection) -> None:
        for pragma in self._layout.pragmas:
            db.execute(f"PRAGMA {pragma}")

    def _prepare(self, db: sqlite3.Connection) -> None:
        """Check the file, and create or upgrade its tables. Raises CacheError for a file of a newer version."""
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        if version > self._layout.version:
            hint = f"Update edgespec, {_ELSEWHERE}"
            raise CacheError(f"{self.file} was written by a newer version of edgespec.", hint=hint)
        found = str(db.execute("PRAGMA integrity_check(1)").fetchone()[0])
        if found != "ok":
            raise DamagedFile(" ".join(found.split()))
        if version == 0:
            if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise DamagedFile("it belongs to another program")
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # only an empty file can take it
        self._set_pragmas(db)
        if version < self._layout.version:
            db.execute("BEGIN IMMEDIATE")
            with db:
                for statement in (*self._layout.statements, f"PRAGMA user_version = {self._layout.version}"):
                    db.execute(statement)
        db.execute("PRAGMA journal_mode = WAL")


def to_cache_error(error: Exception, path: Path) -> CacheError:
    code = _error_code(error)
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _is_full(path.parent)):
        return CacheError(f"{path} cannot be written: the disk is full.", hint=f"Free some space, {_ELSEWHERE}")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return CacheError(f"{path} is locked by another process.", hint=f"Wait for it or stop it, {_ELSEWHERE}")
    if _is_damage(error):
        return CacheError(
            f"{path} is damaged: {reason_of(error)}.", hint="Restart edgespec: a damaged file is set aside."
        )
    hint = f"Check the permissions of the folder and the disk, {_ELSEWHERE}"
    return CacheError(f"{path} cannot be read or written: {reason_of(error)}.", hint=hint)


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _LEAST_FREE
    except OSError:
        return False


def _error_code(error: BaseException) -> int:
    """SQLite's primary result code of an error; 0 without one."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _is_damage(error: BaseException) -> bool:
    if isinstance(error, UnicodeDecodeError):  # Python cannot read an error of SQLite that quotes a damaged name
        return True
    return _error_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _set_aside(path: Path) -> Path:
    """Rename the file and SQLite's files of it. Three are kept; another one takes the place of the oldest."""
    names = [path.with_name(f"{path.name}.damaged-{number}") for number in (1, 2, 3)]
    free = [each for each in names if not each.exists()]
    moved = free[0] if free else min(names, key=lambda each: each.stat().st_mtime)
    for suffix in ("-wal", "-shm", ""):
        with suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{moved}{suffix}")
    return moved
