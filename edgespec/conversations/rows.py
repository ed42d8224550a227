"""Conversion between database rows and conversations and turns."""

from __future__ import annotations

import json
from typing import Any

from edgespec.conversations.database import CONVERSATION_COLUMNS, TURN_COLUMNS
from edgespec.conversations.model import Conversation, Turn, drop_surrogates, make_title

SELECT_TURN = f"SELECT {TURN_COLUMNS} FROM turns"
SELECT_CONVERSATION = (
    f"SELECT {CONVERSATION_COLUMNS}, (SELECT text FROM turns"
    " WHERE conversation = conversations.id AND role = 'user' ORDER BY id LIMIT 1) FROM conversations"
)
INSERT_TURN = f"INSERT INTO turns ({TURN_COLUMNS}) VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


def read_conversation(row: tuple[Any, ...]) -> Conversation:
    """A row of SELECT_CONVERSATION."""
    id, name, model, system, leaf, created, changed, first = row
    title = make_title((first or "")[:500]) if name is None else name
    return Conversation(id, title, name is not None, model, system, leaf, created, changed)


def read_turn(row: tuple[Any, ...]) -> Turn:
    """A row of SELECT_TURN."""
    id, conversation, parent, role, text, reasoning, spans, settings, metrics, finished, created = row
    values = _parse(spans, []), _parse(settings, {}), _parse(metrics, {})
    return Turn(id, conversation, parent, role, text, reasoning, *values, bool(finished), created)


def to_row(turn: Turn) -> tuple[Any, ...]:
    """The values for INSERT_TURN. Raises ValueError or TypeError for values that are not JSON."""
    texts = (turn.role, drop_surrogates(turn.text), drop_surrogates(turn.reasoning))
    values = (to_column(turn.spans), to_column(turn.settings), to_column(turn.metrics))
    return turn.conversation, turn.parent, *texts, *values, turn.finished, turn.created


def to_column(value: Any) -> str:
    """`value` as JSON text. Raises ValueError or TypeError for values that are not JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _parse(text: str, default: Any) -> Any:
    """A JSON value, or `default` for damaged text."""
    try:
        return json.loads(text)
    except ValueError:
        return default
