"""Searching for words in texts: the rule, and the line shown of what it finds."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from edgespec.conversations.model import Conversation, drop_surrogates

_BEFORE, _AFTER = 30, 60  # characters of a snippet around what was found


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A conversation with the newest turn that matches, or None where its title does; `snippet` is one line."""

    conversation: Conversation
    turn: int | None
    snippet: str


def split_words(query: str) -> list[str]:
    """The folded words of what a user typed."""
    return _folded(drop_surrogates(query)).split()


def matches(text: str, words: list[str]) -> bool:
    """Whether every one of `words` occurs in `text`, at whatever place of a word."""
    text = _folded(text)
    return all(word in text for word in words)


def snippet(text: str, words: list[str]) -> str:
    """The part of a text that matches around the first of `words`, on one printable line."""
    low = _folded(text)
    text = unicodedata.normalize("NFC", text)
    origins = [at for at, character in enumerate(text) for _ in character.casefold()]
    at = origins[min(low.find(word) for word in words)]
    start, end = max(0, at - _BEFORE), at + _AFTER
    shown = "".join(c if c.isprintable() else " " for c in text[start:end])
    return ("…" if start else "") + " ".join(shown.split()) + ("…" if end < len(text) else "")


def _folded(text: str) -> str:
    """`text` without differences of case and composition."""
    return unicodedata.normalize("NFC", text).casefold()
