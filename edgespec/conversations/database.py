"""Opens the SQLite file of conversations, creates its tables, and sets damaged files aside."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from edgespec.conversations.search import INDEX_SCHEMA, index_turn
from edgespec.errors import CacheError, reason_of

CONVERSATION_COLUMNS = "id, name, model, system, leaf, created, changed"
TURN_COLUMNS = "id, conversation, parent, role, text, reasoning, spans, settings, metrics, finished, created"

_VERSION = 2
_SCHEMA = (
    """
    CREATE TABLE conversations (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT,
        model TEXT NOT NULL,
        system TEXT,
        leaf INTEGER,
        created REAL NOT NULL,
        changed REAL NOT NULL
    )
    """,
    """
    CREATE TABLE turns (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        conversation INTEGER NOT NULL REFERENCES conversations,
        parent INTEGER REFERENCES turns,
        role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
        text TEXT NOT NULL,
        reasoning TEXT NOT NULL,
        spans TEXT NOT NULL,
        settings TEXT NOT NULL,
        metrics TEXT NOT NULL,
        finished INTEGER NOT NULL,
        created REAL NOT NULL
    )
    """,
    "CREATE INDEX turns_by_conversation ON turns (conversation)",
    "CREATE INDEX turns_by_parent ON turns (parent)",
)
_ELSEWHERE = "or set EDGESPEC_DATA_DIR to another folder."


class _Damaged(Exception):
    """The file is not a valid database of conversations."""


def data_folder() -> Path:
    """The folder of conversations: EDGESPEC_DATA_DIR, else the platform's data folder."""
    import platformdirs

    configured = os.environ.get("EDGESPEC_DATA_DIR")
    return Path(configured) if configured else platformdirs.user_data_path("edgespec")


def open_database(path: Path, wait_s: float) -> tuple[sqlite3.Connection, str | None]:
    """A connection to the file at `path`, created if missing, and a notice if a damaged file was set aside.

    Raises CacheError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path, wait_s):
            try:
                return _connect(path, wait_s), None
            except _Damaged as damage:
                moved = _set_aside(path)
                notice = f"{path} is damaged ({damage}). It is renamed to {moved.name}, and a new file is used."
                return _connect(path, wait_s), notice
    except (OSError, sqlite3.Error, _Damaged) as error:
        raise to_cache_error(error, path) from error


def prepare(db: sqlite3.Connection) -> None:
    """Configure a connection and create the tables of a new file. Raises _Damaged for tables of another program."""
    db.text_factory = lambda data: data.decode("utf-8", "replace")
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA secure_delete = ON")
    db.execute("PRAGMA synchronous = NORMAL")
    if _version(db) == 0:
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise _Damaged("it belongs to another program")
        with _upgrade(db):
            for statement in (*_SCHEMA, *INDEX_SCHEMA):
                db.execute(statement)
    try:
        db.execute(f"SELECT {CONVERSATION_COLUMNS} FROM conversations LIMIT 0")
        db.execute(f"SELECT {TURN_COLUMNS} FROM turns LIMIT 0")
        if _version(db) < _VERSION:
            _add_index(db)
        db.execute("SELECT turn, conversation, text FROM folded LIMIT 0")
    except sqlite3.OperationalError as error:
        if _error_code(error) != sqlite3.SQLITE_ERROR:
            raise
        raise _Damaged(reason_of(error)) from error


@contextmanager
def _upgrade(db: sqlite3.Connection) -> Iterator[None]:
    """A transaction at whose end the file has the current version."""
    db.execute("BEGIN IMMEDIATE")
    yield
    db.execute(f"PRAGMA user_version = {_VERSION}")
    db.execute("COMMIT")


def _add_index(db: sqlite3.Connection) -> None:
    """Add the index of searches to a file without one."""
    with _upgrade(db):
        for statement in INDEX_SCHEMA:
            db.execute(statement)
        for row in db.execute("SELECT id, conversation, text FROM turns WHERE finished").fetchall():
            index_turn(db, *row)


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


def _connect(path: Path, wait_s: float) -> sqlite3.Connection:
    path.touch(mode=0o600)  # SQLite gives its other files the same permissions
    log = Path(f"{path}-wal")
    if path.stat().st_size == 0 and log.exists() and log.stat().st_size:
        raise _Damaged("it is empty, but its log is not")  # SQLite would treat it as a new file and delete the log
    db = sqlite3.connect(path, timeout=wait_s, isolation_level=None)
    try:
        if _version(db) > _VERSION:
            hint = f"Update edgespec, {_ELSEWHERE}"
            raise CacheError(f"{path} was written by a newer version of edgespec.", hint=hint)
        found = str(db.execute("PRAGMA integrity_check(1)").fetchone()[0])
        if found != "ok":
            raise _Damaged(" ".join(found.split()))
        db.execute("PRAGMA journal_mode = WAL")
        prepare(db)
    except BaseException as error:
        db.close()
        if _is_damage(error):
            raise _Damaged(reason_of(error)) from error
        raise
    return db


def _error_code(error: BaseException) -> int:
    """SQLite's primary result code of an error; 0 without one."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _is_damage(error: BaseException) -> bool:
    return _error_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


@contextmanager
def _lock(path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock under which one process creates the file or sets it aside."""
    with closing(sqlite3.connect(f"{path}.lock", timeout=wait_s, isolation_level=None)) as lock:
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
