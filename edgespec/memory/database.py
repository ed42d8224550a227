"""The SQLite file of the memory: its tables, and how deleted rows leave the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from edgespec.databases import Layout, SharedDatabase
from edgespec.errors import CacheError

FILE_NAME = "memory.db"
SEGMENT_SUFFIX = ".segment"
_LAYOUT = Layout(
    1,
    ("synchronous = NORMAL", "secure_delete = ON", "temp_store = MEMORY"),
    (
        "CREATE TABLE spaces (id INTEGER PRIMARY KEY, tokenizer TEXT NOT NULL, namespace TEXT NOT NULL,"
        " UNIQUE (tokenizer, namespace))",
        "CREATE TABLE texts (id INTEGER PRIMARY KEY AUTOINCREMENT, space INTEGER NOT NULL REFERENCES spaces,"
        " source TEXT, is_corpus INTEGER NOT NULL, time REAL NOT NULL, n_lead INTEGER NOT NULL,"
        " answer INTEGER NOT NULL, checksum INTEGER NOT NULL, keys BLOB NOT NULL, tokens BLOB NOT NULL)",
        "CREATE INDEX texts_by_space ON texts (space, id)",
        "CREATE INDEX texts_by_source ON texts (source) WHERE source IS NOT NULL",
        # The last use of a text, as the greatest id of texts at that time: no clock is needed.
        "CREATE TABLE uses (text INTEGER PRIMARY KEY, used INTEGER NOT NULL)",
        # The files of indexes over all texts of a space with ids from first to last.
        "CREATE TABLE segments (name TEXT PRIMARY KEY, space INTEGER NOT NULL REFERENCES spaces,"
        " first INTEGER NOT NULL, last INTEGER NOT NULL, n_tokens INTEGER NOT NULL, bytes INTEGER NOT NULL)",
        # A model with the tokenizer, by the name that its user knows.
        "CREATE TABLE models (tokenizer TEXT PRIMARY KEY, name TEXT NOT NULL) WITHOUT ROWID",
        "CREATE TABLE learned (space INTEGER NOT NULL REFERENCES spaces, name TEXT NOT NULL, data BLOB NOT NULL,"
        " PRIMARY KEY (space, name)) WITHOUT ROWID",
        # A row for each time that texts were forgotten. The greatest id is the epoch.
        "CREATE TABLE forgotten (id INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT, source TEXT)",
    ),
)


class Database(SharedDatabase):
    """The folder of the memory: memory.db, under whose lock all processes write, and the files of segments."""

    @classmethod
    def open(cls, folder: Path, wait_s: float = 5.0) -> Self:
        """The memory in `folder`, created if missing, which only its user can read; waits up to `wait_s` for locks."""
        return cls(folder / FILE_NAME, _LAYOUT, wait_s)

    @property
    def folder(self) -> Path:
        return self.file.parent

    def name_tokenizer(self, tokenizer: str, model: str) -> None:
        """Remember a model that has this tokenizer, by the name that its user knows."""
        with self.write() as db:
            update = "DO UPDATE SET name = excluded.name WHERE name <> excluded.name"
            db.execute(f"INSERT INTO models (tokenizer, name) VALUES (?, ?) ON CONFLICT {update}", (tokenizer, model))

    def remove_leftovers(self) -> None:
        """Remove the files that no segment has: of processes that were killed, of removed texts."""
        with self.write() as db:  # no process is about to add a segment
            names = {name for (name,) in db.execute("SELECT name FROM segments")}
            for path in self.folder.iterdir():
                is_segment = path.suffix == SEGMENT_SUFFIX or f"{SEGMENT_SUFFIX}." in path.name  # or a partial one
                if is_segment and path.name not in names:
                    path.unlink(missing_ok=True)

    def scrub(self) -> None:
        """Leave no byte of deleted rows in the folder, nor files that were damaged and set aside.

        Raises CacheError, also if another process reads the database for too long.
        """
        self.remove_leftovers()
        with self.read() as db:
            for damaged in self.folder.glob(f"{FILE_NAME}.damaged-*"):
                damaged.unlink(missing_ok=True)
            db.executescript("PRAGMA incremental_vacuum")  # execute() stops after a page
            is_busy = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if is_busy:
            raise CacheError(
                f"Removed texts may still be in {self.file}-wal, because another process reads it.",
                hint="Run the command again, or stop the other process first.",
            )
