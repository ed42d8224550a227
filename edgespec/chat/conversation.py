"""Conversations and turns as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
