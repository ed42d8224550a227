"""Tool calls, and the events of calls that are being read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of the tool `name`; `arguments` is a JSON object as text, or its beginning if the call was cut."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a call; `index` counts the calls of an answer from 0. `id` is the one that the model wrote in
    front of the arguments; "" without one.
    """

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of a call's arguments. The deltas of a call, joined, are its arguments."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call. `is_cut`: its arguments are not complete."""

    index: int
    call: ToolCall
    is_cut: bool = False


AnswerPart = str | CallStart | CallDelta | CallEnd
NAME_CHARACTER = "[A-Za-z0-9_.:/-]"
"""Regular expression of one character of a tool's name."""

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's arguments, by the tool's name."""


def load_json(text: str, default: Any = None) -> Any:
    """The value of a JSON text; `default` for any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return default
