"""Removal of texts: those that are forgotten, and those that were of no use for longest."""

from __future__ import annotations

import sqlite3
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from edgespec.memory.database import Database

_WORDS = 3  # for a token: one in the database, two in a segment
BYTES = 4 * _WORDS
"""Bytes that a stored token takes."""

_ROW_BYTES = 100  # bytes of a text's other columns
_REMAINING = 0.9  # share of the limit that is in use after texts were removed


def remove_texts(db: sqlite3.Connection, condition: str, parameters: Sequence[object]) -> int:
    """Delete the texts that meet an SQL condition; returns their number of tokens.

    In each space, the segments from the first one of such a text on are deleted too, and built again. The epoch grows,
    so that engines read again which texts are stored.
    """
    met = f"t.space = segments.space AND t.id <= last AND {condition}"
    db.execute(f"DELETE FROM segments WHERE EXISTS (SELECT 1 FROM texts t WHERE {met})", parameters)
    db.execute("INSERT INTO forgotten DEFAULT VALUES")
    total = f"SELECT coalesce(sum(length(tokens) / 4 - n_lead), 0) FROM texts t WHERE {condition}"
    n = int(db.execute(total, parameters).fetchone()[0])
    db.execute(f"DELETE FROM texts AS t WHERE {condition}", parameters)
    db.execute("DELETE FROM uses WHERE text NOT IN (SELECT id FROM texts)")
    return n


def age_out(database: Database, limit_bytes: int) -> None:
    """Remove texts, those used longest ago first, if all of them and their segments need more than `limit_bytes`.

    Raises CacheError.
    """
    needed = database.query("SELECT coalesce(sum(length(data)), 0) FROM learned")[0][0]
    by_use = database.query(
        f"SELECT coalesce(used, id), {_WORDS} * length(tokens) + length(keys) + {_ROW_BYTES}"
        " FROM texts LEFT JOIN uses ON text = id ORDER BY 1"
    )
    excess = needed + sum(n for _, n in by_use) - limit_bytes
    if excess <= 0:
        return
    excess += int((1 - _REMAINING) * limit_bytes)
    n_removed = bisect_left(list(accumulate(n for _, n in by_use)), excess)
    last = by_use[: n_removed + 1][-1][0] if by_use else 0
    with database.write() as db:
        remove_texts(db, "coalesce((SELECT used FROM uses WHERE text = t.id), t.id) <= ?", (last,))
        db.execute("DELETE FROM learned WHERE space NOT IN (SELECT space FROM texts)")
    database.remove_leftovers()
