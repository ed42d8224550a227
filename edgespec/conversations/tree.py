"""The tree of a conversation's turns: what follows each turn, and where a branch ends. Empty answers do not count."""

from __future__ import annotations

import sqlite3

from edgespec.conversations.rows import SELECT_TURN

_NOT_EMPTY = "(role = 'user' OR text <> '' OR reasoning <> '')"
# The newest descendant of a turn that is not an empty answer.
SELECT_NEWEST_LEAF = (
    "WITH RECURSIVE below (id) AS (SELECT ? UNION SELECT turns.id FROM turns JOIN below ON parent = below.id)"
    f" {SELECT_TURN} WHERE id = (SELECT max(id) FROM turns WHERE id IN (SELECT id FROM below) AND {_NOT_EMPTY})"
)


def list_branches(db: sqlite3.Connection, conversation: int) -> dict[int | None, list[int]]:
    """The ids of the turns after each parent, oldest first; those at the start are after None."""
    found: dict[int | None, list[int]] = {}
    query = f"SELECT parent, id FROM turns WHERE conversation = ? AND {_NOT_EMPTY} ORDER BY id"
    for parent, id in db.execute(query, (conversation,)).fetchall():
        found.setdefault(parent, []).append(id)
    return found
