"""Word search in texts: the matching rule, the index of finished turns, and the snippets of matches."""

from __future__ import annotations

import sqlite3
import unicodedata
from dataclasses import dataclass

from edgespec.conversations.model import Conversation, drop_surrogates

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
    """Of a folded word: folding it again may change it."""
    escaped = "".join(f"[{c}]" if c in "*?[" else c for c in _drop_nuls(word))
    return f"*{escaped}*"


def _fold(text: str) -> str:
    """`text` with case and Unicode composition normalized."""
    return unicodedata.normalize("NFC", text).casefold()
