"""Opens the SQLite file of conversations and creates its tables."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgespec import databases
from edgespec.conversations.search import INDEX_SCHEMA, index_turn
from edgespec.databases import read_version, require_columns

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


def data_folder() -> Path:
    """The folder of conversations: EDGESPEC_DATA_DIR, else the platform's data folder."""
    import platformdirs

    configured = os.environ.get("EDGESPEC_DATA_DIR")
    return Path(configured) if configured else platformdirs.user_data_path("edgespec")


def open_database(path: Path, wait_s: float) -> tuple[sqlite3.Connection, str | None]:
    """A connection to the file at `path`, created if missing, and a notice if a damaged file was set aside.

    Raises CacheError.
    """
    return databases.open_database(path, _VERSION, prepare, wait_s)


def prepare(db: sqlite3.Connection) -> None:
    """Configure a connection and create the tables of a new file. Raises DamagedFile for tables of another program."""
    db.text_factory = lambda data: data.decode("utf-8", "replace")
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA secure_delete = ON")
    db.execute("PRAGMA synchronous = NORMAL")
    if read_version(db) == 0:
        with _upgrade(db):
            for statement in (*_SCHEMA, *INDEX_SCHEMA):
                db.execute(statement)
    require_columns(db, {"conversations": CONVERSATION_COLUMNS, "turns": TURN_COLUMNS})
    if read_version(db) < _VERSION:
        _add_index(db)
    require_columns(db, {"folded": "turn, conversation, text"})


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
