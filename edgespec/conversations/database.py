"""Conversations and turns as values, the rule of searches, and the folders in which everything is kept."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edgespec.folders import ADAPTED, MEMORY
from edgespec.memory.store import TextStore
from edgespec.registry.adapted import clear_runs

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


# Word search in texts: the matching rule, and the snippets of matches.


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


def name_source(id: int) -> str:
    """The source under which the memory keeps the texts of a saved conversation."""
    return f"chat:{id}"


def forget_conversation(folder: Path, id: int) -> None:
    """Remove the texts of a conversation from what else the data folder `folder` has of them. Raises CacheError."""
    if (memory := folder / MEMORY).is_dir():
        with closing(TextStore.open(memory)) as store:
            store.forget(name_source(id))
    clear_runs(folder / ADAPTED, own_texts=False)
