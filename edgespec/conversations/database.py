"""Opens the SQLite file of conversations and creates its tables."""

from __future__ import annotations

import os
import sqlite3
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edgespec import databases
from edgespec.databases import read_version, require_columns
from edgespec.errors import CacheError
from edgespec.memory.store import TextStore
from edgespec.units import gib

# Conversations and turns as immutable values; they do not follow later changes of the file.


Role = Literal["user", "assistant"]
Spans = Sequence[Sequence[Any]]
"""The origin of the parts of a text: short lists of JSON values that the caller defines."""

UNTITLED = "Untitled"
_TITLE_LENGTH = 60


@dataclass(frozen=True, slots=True)
class Conversation:
    """A tree of turns with its settings; times in seconds since 1970.

    `title` comes from the first user message until the conversation is `renamed`. `leaf` is the id of the last turn of
    the current branch, None before the first.
    """

    id: int
    title: str
    renamed: bool
    model: str
    system: str | None
    leaf: int | None
    created: float
    changed: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. `parent` is the id of the turn before, None for the first; turns of one parent are branches.

    `settings` and `metrics` are JSON objects. A turn that is not `finished` is being generated, or its process ended.
    """

    id: int
    conversation: int
    parent: int | None
    role: Role
    text: str
    reasoning: str
    spans: Spans
    settings: Mapping[str, Any]
    metrics: Mapping[str, Any]
    finished: bool
    created: float


def drop_surrogates(text: str) -> str:
    """`text` without lone surrogates, which terminals can produce and UTF-8 cannot encode."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def make_title(text: str) -> str:
    """A short title: the first line with text, printable, cut at a word."""
    for line in text.splitlines():
        words = "".join(c if c.isprintable() else " " for c in line).split()
        if title := " ".join(words):
            if len(title) <= _TITLE_LENGTH:
                return title
            cut = title[:_TITLE_LENGTH]
            return (cut[: cut.rfind(" ")] if " " in cut[_TITLE_LENGTH // 2 :] else cut[:-1]) + "…"
    return UNTITLED


# Word search in texts: the matching rule, the index of finished turns, and the snippets of matches.


INDEX_SCHEMA = (
    """
    CREATE TABLE folded (
        turn INTEGER PRIMARY KEY REFERENCES turns ON DELETE CASCADE,
        conversation INTEGER NOT NULL,
        text TEXT NOT NULL
    )
    """,
    "CREATE INDEX turns_unfinished ON turns (conversation) WHERE NOT finished",
    "CREATE TRIGGER reopened AFTER UPDATE OF finished ON turns WHEN NOT new.finished"
    " BEGIN DELETE FROM folded WHERE turn = new.id; END",
)
_MAX_WORDS = 100  # of a query, the longest ones, that the index is asked for
_BEFORE, _AFTER = 30, 60  # characters of a snippet around a match


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A conversation with its newest matching turn, or None if only the title matches; `snippet` is one line."""

    conversation: Conversation
    turn: int | None
    snippet: str


def split_words(query: str) -> list[str]:
    """The case-folded words of a query."""
    return _fold(drop_surrogates(query)).split()


def matches(text: str, words: list[str]) -> bool:
    """Whether each of `words` occurs in `text`, also inside of words."""
    text = _fold(text)
    return all(word in text for word in words)


def index_turn(db: sqlite3.Connection, turn: int, conversation: int, text: str) -> None:
    """Add a finished turn to the index, which holds the text as words are compared with it."""
    db.execute("INSERT OR REPLACE INTO folded VALUES (?, ?, ?)", (turn, conversation, _drop_nuls(_fold(text))))


def find_turns(db: sqlite3.Connection, words: list[str]) -> dict[int, int]:
    """The newest matching turn of each conversation, by the conversation's id. Reads the whole index."""
    asked = sorted(set(words), key=len, reverse=True)[:_MAX_WORDS]
    conditions = " AND ".join(["text GLOB ?"] * len(asked))  # faster than instr()
    query = f"SELECT conversation, max(turn) FROM folded WHERE {conditions} GROUP BY conversation"
    found: dict[int, int] = dict(db.execute(query, [_to_pattern(word) for word in asked]).fetchall())
    for turn, conversation, text in db.execute("SELECT id, conversation, text FROM turns WHERE NOT finished"):
        if matches(text, words):
            found[conversation] = max(turn, found.get(conversation, 0))
    return found


def snippet(text: str, words: list[str]) -> str:
    """The part of a matching text around the first match, on one printable line."""
    low = _fold(text)
    text = unicodedata.normalize("NFC", text)
    origins = [at for at, character in enumerate(text) for _ in character.casefold()]
    at = origins[min(low.find(word) for word in words)]
    start, end = max(0, at - _BEFORE), at + _AFTER
    shown = "".join(c if c.isprintable() else " " for c in text[start:end])
    return ("…" if start else "") + " ".join(shown.split()) + ("…" if end < len(text) else "")


def _drop_nuls(text: str) -> str:
    return text.replace("\0", "\ufffd")  # GLOB reads up to the first NUL


def _to_pattern(word: str) -> str:
    """The GLOB pattern of a word that is folded already: folding it again may change it."""
    escaped = "".join(f"[{c}]" if c in "*?[" else c for c in _drop_nuls(word))
    return f"*{escaped}*"


def _fold(text: str) -> str:
    """`text` with case and Unicode composition normalized."""
    return unicodedata.normalize("NFC", text).casefold()


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


# The memory of earlier texts, as far as it concerns conversations: its folder, and what it has of one of them.


def memory_folder() -> Path:
    """The folder of the user's memory; it may be missing."""
    return data_folder() / "memory"


def name_source(id: int) -> str:
    """The source under which the memory keeps the texts of a saved conversation."""
    return f"chat:{id}"


def forget_conversation(folder: Path, id: int) -> None:
    """Remove the texts of a conversation from the memory in `folder`, if there is one. Raises CacheError."""
    if folder.is_dir():
        with closing(TextStore.open(folder)) as store:
            store.forget(name_source(id))


def describe_memory() -> dict[str, Any]:
    """The path of the user's memory, its state in words, and how many tokens and bytes it has where there is one."""
    folder = memory_folder()
    if not folder.is_dir():
        return {"path": str(folder), "state": "nothing is kept yet"}
    try:
        with closing(TextStore.open(folder)) as store:
            tokens, n_bytes = sum(each.n_tokens for each in store.status()), store.size()
    except CacheError as error:
        return {"path": str(folder), "state": f"cannot be used: {error.message}"}
    return {"path": str(folder), "state": f"{tokens:,} tokens in {gib(n_bytes)}", "tokens": tokens, "bytes": n_bytes}


# Where the drafts lie that were adapted to their user.


def adapted_folder() -> Path:
    """The folder of the user's adapted drafts; it may be missing."""
    return data_folder() / "adapted"
