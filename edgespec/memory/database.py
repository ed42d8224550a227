"""The SQLite file of the memory: its tables and transactions, and how deleted rows leave the disk."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from edgespec.databases import open_database, read_version, require_columns, to_cache_error
from edgespec.errors import CacheError

FILE_NAME = "memory.db"
SEGMENT_SUFFIX = ".segment"
_VERSION = 1
_SCHEMA = (
    "CREATE TABLE spaces (id INTEGER PRIMARY KEY, tokenizer TEXT NOT NULL, namespace TEXT NOT NULL,"
    " UNIQUE (tokenizer, namespace))",
    "CREATE TABLE texts (id INTEGER PRIMARY KEY AUTOINCREMENT, space INTEGER NOT NULL REFERENCES spaces,"
    " source TEXT, is_corpus INTEGER NOT NULL, time REAL NOT NULL, n_lead INTEGER NOT NULL, answer INTEGER NOT NULL,"
    " checksum INTEGER NOT NULL, keys BLOB NOT NULL, tokens BLOB NOT NULL)",
    "CREATE INDEX texts_by_space ON texts (space, id)",
    "CREATE INDEX texts_by_source ON texts (source) WHERE source IS NOT NULL",
    # The last use of a text, as the greatest id of texts at that time: no clock is needed.
    "CREATE TABLE uses (text INTEGER PRIMARY KEY, used INTEGER NOT NULL)",
    # The files of indexes over all texts of a space with ids from first to last.
    "CREATE TABLE segments (name TEXT PRIMARY KEY, space INTEGER NOT NULL REFERENCES spaces, first INTEGER NOT NULL,"
    " last INTEGER NOT NULL, n_tokens INTEGER NOT NULL, bytes INTEGER NOT NULL)",
    # A model with the tokenizer, by the name that its user knows.
    "CREATE TABLE models (tokenizer TEXT PRIMARY KEY, name TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE learned (space INTEGER NOT NULL REFERENCES spaces, name TEXT NOT NULL, data BLOB NOT NULL,"
    " PRIMARY KEY (space, name)) WITHOUT ROWID",
    # What was forgotten: all, or of a namespace or of a source, by their hashes. The greatest id is the epoch.
    "CREATE TABLE forgotten (id INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT, source TEXT)",
)


class Database:
    """The folder of the memory: memory.db and the files of segments. Any thread may use it.

    `notice` is a sentence about a damaged file that `open` set aside, else None.
    """

    def __init__(self, folder: Path, db: sqlite3.Connection, notice: str | None, wait_s: float) -> None:
        """Use `open`."""
        self.folder = folder
        self._wait_s = wait_s
        self.notice = notice
        self._db = db
        self._lock = threading.RLock()

    @classmethod
    def open(cls, folder: Path, wait_s: float = 5.0) -> Self:
        """The memory in `folder`, created if missing; waits up to `wait_s` for locks. Raises CacheError.

        Replaces a damaged file by a new one and keeps the old under another name. Only its user can read the folder.
        """
        path = folder / FILE_NAME
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise to_cache_error(error, path) from error
        return cls(folder, *open_database(path, _VERSION, _prepare, wait_s, any_thread=True), wait_s)

    def reopen(self) -> Database:
        """Another connection, so that a thread does not wait for the transactions of this one. Raises CacheError."""
        path = self.folder / FILE_NAME
        try:
            db = sqlite3.connect(path, timeout=self._wait_s, isolation_level=None, check_same_thread=False)
            _prepare(db)
        except sqlite3.Error as error:
            raise to_cache_error(error, path) from error
        return Database(self.folder, db, None, self._wait_s)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """The connection, for single statements. Raises CacheError."""
        with self._lock:
            try:
                yield self._db
            except (OSError, sqlite3.Error) as error:
                raise to_cache_error(error, self.folder / FILE_NAME) from error

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """The connection in a transaction: the one lock under which all processes write the folder.

        Raises CacheError, and nothing is changed then.
        """
        with self.read() as db, _transaction(db):
            yield db

    def version(self) -> int:
        """Another number after every change by another connection. Raises CacheError."""
        with self.read() as db:
            return int(db.execute("PRAGMA data_version").fetchone()[0])

    def remove_leftovers(self) -> None:
        """Remove the files that no segment has: of processes that were killed, of removed texts. Raises CacheError."""
        with self.write() as db:  # no process is about to add a segment
            names = {name for (name,) in db.execute("SELECT name FROM segments")}
            for path in self.folder.iterdir():
                is_segment = path.suffix == SEGMENT_SUFFIX or f"{SEGMENT_SUFFIX}." in path.name  # or a partial one
                if is_segment and path.name not in names:
                    path.unlink(missing_ok=True)

    def scrub(self) -> None:
        """Leave no byte of deleted rows in the folder, nor files that were damaged and set aside.

        Raises CacheError, also where another process reads the database for too long.
        """
        self.remove_leftovers()
        path = self.folder / FILE_NAME
        with self.read() as db:
            for damaged in self.folder.glob(f"{FILE_NAME}.damaged-*"):
                damaged.unlink(missing_ok=True)
            db.executescript("PRAGMA incremental_vacuum")  # execute() stops after a page
            is_busy = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if is_busy:
            raise CacheError(
                f"Removed texts may still be in {path}-wal, because another process reads it.",
                hint="Run the command again, or stop the other process first.",
            )


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Roll back on an error."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # SQLite rolls back by itself on some errors
            db.execute("ROLLBACK")
        raise


def _prepare(db: sqlite3.Connection) -> None:
    """Configure a connection and create the tables of a new file. Raises DamagedFile for other tables."""
    is_new = read_version(db) == 0
    if is_new:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("PRAGMA secure_delete = ON")
    db.execute("PRAGMA temp_store = MEMORY")
    if is_new:
        with _transaction(db):
            for statement in _SCHEMA:
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {_VERSION}")
    require_columns(db, {"texts": "keys, tokens", "uses": "used", "segments": "bytes", "learned": "data"})
    require_columns(db, {"spaces": "tokenizer, namespace", "forgotten": "namespace, source", "models": "name"})
