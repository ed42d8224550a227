"""Word search in texts: the matching rule, and the snippets of matches."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from edgespec.chat.conversation import Conversation, drop_surrogates

_BEFORE, _AFTER = 30, 60  # characters of a snippet around a match


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A conversation with its newest matching turn, or None if only the title matches; `snippet` is one line."""

    conversation: Conversation
    turn: int | None
    snippet: str


def split_words(query: str) -> list[str]:
    return _fold(drop_surrogates(query)).split()


def matches(text: str, words: list[str]) -> bool:
    """Whether each of `words` occurs in `text`, also inside of words."""
    text = _fold(text)
    return all(word in text for word in words)


def snippet(text: str, words: list[str]) -> str:
    """The part of a matching text around the first match, on one printable line."""
    low = _fold(text)
    text = unicodedata.normalize("NFC", text)
    origins = [at for at, character in enumerate(text) for _ in character.casefold()]
    at = origins[min(low.find(word) for word in words)]
    start, end = max(0, at - _BEFORE), at + _AFTER
    shown = "".join(c if c.isprintable() else " " for c in text[start:end])
    return ("…" if start else "") + " ".join(shown.split()) + ("…" if end < len(text) else "")


def _fold(text: str) -> str:
    """`text` with case and Unicode composition normalized."""
    return unicodedata.normalize("NFC", text).casefold()
