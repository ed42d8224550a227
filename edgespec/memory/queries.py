"""What an engine reads and writes in the database: texts of a space, their segments, and what drafters have learned."""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgespec.files import write_private
from edgespec.memory.database import SEGMENT_SUFFIX, Database
from edgespec.memory.texts import Origin, SpaceKey, StoredText

_SEGMENT = "name, first, last, n_tokens"
_SPACE = "(SELECT id FROM spaces WHERE tokenizer = ? AND namespace = ?)"


class SegmentRow(NamedTuple):
    """A segment file: an index of all texts with ids from first to last."""

    name: str
    first: int
    last: int
    n_tokens: int


class BuildPlan(NamedTuple):
    """A segment of all texts with ids from `first` to `last`, in place of others."""

    first: int
    last: int
    n_tokens: int
    replaced: tuple[SegmentRow, ...]


def read_epoch(database: Database) -> int:
    """How often texts were forgotten. Raises CacheError, like every function here."""
    return int(database.query("SELECT coalesce(max(id), 0) FROM forgotten")[0][0])


def add_texts(database: Database, key: SpaceKey, texts: Sequence[StoredText]) -> None:
    """Store texts and set their ids.

    A text that was begun before others were forgotten may be one of these: it is not stored, and its id is -1.
    """
    with database.write() as db:
        db.execute("INSERT OR IGNORE INTO spaces (tokenizer, namespace) VALUES (?, ?)", key)
        epoch = read_epoch(database)
        ids = [_insert(db, key, text) if text.origin.epoch == epoch else -1 for text in texts]
    for text, id in zip(texts, ids, strict=True):
        text.id = id


def read_texts(
    database: Database, key: SpaceKey, first: int, last: int = 2**63 - 1, limit: int = -1
) -> list[StoredText]:
    """The texts with ids from `first` to `last`, in that order, at most `limit` of them; damaged ones are left out."""
    columns = "tokens, n_lead, answer, is_corpus, source, time, keys, id, checksum"
    query = f"SELECT {columns} FROM texts WHERE space = {_SPACE} AND id BETWEEN ? AND ? ORDER BY id LIMIT ?"
    return list(_to_texts(database.query(query, *key, first, last, limit)))


def list_unindexed(database: Database, key: SpaceKey) -> list[tuple[int, int]]:
    """(id, number of tokens) of every text that is in no segment, by id; they follow those that are in one."""
    indexed = "SELECT coalesce(max(last), 0) FROM segments WHERE space = texts.space"
    query = f"SELECT id, length(tokens) / 4 FROM texts WHERE space = {_SPACE} AND id > ({indexed}) ORDER BY id"
    return database.query(query, *key)


def read_keys(database: Database, key: SpaceKey) -> set[int]:
    rows = database.query(f"SELECT keys FROM texts WHERE space = {_SPACE}", *key)
    return set(np.frombuffer(b"".join(keys for (keys,) in rows), np.uint64).tolist())


def read_source_keys(database: Database, key: SpaceKey, source: str) -> dict[int, set[int]]:
    """The keys of the blocks of every text of a source, by the text's id."""
    query = f"SELECT id, keys FROM texts WHERE source = ? AND space = {_SPACE}"
    return {id: set(np.frombuffer(keys, np.uint64).tolist()) for id, keys in database.query(query, source, *key)}


def list_documents(database: Database, key: SpaceKey, path: Path) -> list[str]:
    """The sources of the documents at an absolute path and below it."""
    condition, parameters = match_documents(path)
    query = f"SELECT DISTINCT source FROM texts t WHERE {condition} AND space = {_SPACE}"
    return [source for (source,) in database.query(query, *parameters, *key)]


def match_documents(path: Path) -> tuple[str, tuple[str, ...]]:
    """The SQL condition, with its parameters, for the documents `t` at an absolute path and below it."""
    source = clean_source(str(path))
    below = source if source.endswith(os.sep) else source + os.sep
    return "t.is_corpus AND (t.source = ? OR substr(t.source, 1, length(?)) = ?)", (source, below, below)


def clean_source(source: str) -> str:
    """A source as it is stored: without lone surrogates, which SQLite refuses."""
    return source.encode("utf-8", "replace").decode()


def count_corpus_tokens(database: Database) -> int:
    query = "SELECT coalesce(sum(length(tokens) / 4 - n_lead), 0) FROM texts WHERE is_corpus"
    return int(database.query(query)[0][0])


def mark_used(database: Database, ids: Iterable[int]) -> None:
    """Mark the texts as used, which keeps them longer."""
    with database.write() as db:
        statement = "REPLACE INTO uses (text, used) SELECT id, (SELECT max(id) FROM texts) FROM texts WHERE id = ?"
        db.executemany(statement, [(id,) for id in ids])


def list_segments(database: Database, key: SpaceKey) -> list[SegmentRow]:
    """The segments, by id of their texts; no two of them have the same text."""
    query = f"SELECT {_SEGMENT} FROM segments WHERE space = {_SPACE} ORDER BY first"
    return [SegmentRow(*row) for row in database.query(query, *key)]


def add_segment(database: Database, key: SpaceKey, plan: BuildPlan, data: bytes, epoch: int) -> None:
    """Write the segment of `plan` to a file; `data` is what `build_segment` has returned.

    Nothing is written if texts were forgotten since `epoch`, or another process has built segments of these texts.
    """
    inside = f"space = {_SPACE} AND last >= ? AND first <= ?"
    name = f"{plan.first}-{plan.last}-{os.urandom(8).hex()}{SEGMENT_SUFFIX}"
    with database.write() as db:
        found = db.execute(f"SELECT {_SEGMENT} FROM segments WHERE {inside}", (*key, plan.first, plan.last))
        if read_epoch(database) != epoch or {SegmentRow(*row) for row in found} != set(plan.replaced):
            return
        write_private(database.folder / name, data)
        db.executemany("DELETE FROM segments WHERE name = ?", [(each.name,) for each in plan.replaced])
        db.execute(
            f"INSERT INTO segments (name, space, first, last, n_tokens, bytes) VALUES (?, {_SPACE}, ?, ?, ?, ?)",
            (name, *key, plan.first, plan.last, plan.n_tokens, len(data)),
        )
    if plan.replaced:
        database.remove_leftovers()


def drop_segments(database: Database, key: SpaceKey, first: int) -> None:
    with database.write() as db:
        db.execute(f"DELETE FROM segments WHERE space = {_SPACE} AND first >= ?", (*key, first))
    database.remove_leftovers()


def read_learned(database: Database, key: SpaceKey, name: str) -> bytes | None:
    query = f"SELECT data FROM learned WHERE space = {_SPACE} AND name = ?"
    found = database.query(query, *key, name)
    return bytes(found[0][0]) if found else None


def save_learned(database: Database, key: SpaceKey, name: str, data: bytes, epoch: int) -> None:
    """Save `data` under `name`, unless texts were forgotten since `epoch`."""
    with database.write() as db:
        if read_epoch(database) == epoch:
            db.execute("INSERT OR IGNORE INTO spaces (tokenizer, namespace) VALUES (?, ?)", key)
            db.execute(f"REPLACE INTO learned (space, name, data) VALUES ({_SPACE}, ?, ?)", (*key, name, data))


def _insert(db: sqlite3.Connection, key: SpaceKey, text: StoredText) -> int:
    tokens, origin = text.tokens.tobytes(), text.origin
    statement = (
        "INSERT INTO texts (space, source, is_corpus, time, n_lead, answer, checksum, keys, tokens)"
        f" VALUES ({_SPACE}, ?, ?, ?, ?, ?, ?, ?, ?)"
    )
    said = (origin.source, origin.is_corpus, origin.time, text.n_lead, text.answer)
    row = db.execute(statement, (*key, *said, zlib.crc32(tokens), text.keys.tobytes(), tokens))
    assert row.lastrowid is not None
    return row.lastrowid


def _to_texts(rows: Iterable[tuple[bytes, int, int, int, str | None, float, bytes, int, int]]) -> Iterator[StoredText]:
    for tokens, n_lead, answer, is_corpus, source, time, keys, id, checksum in rows:
        if zlib.crc32(tokens) == checksum:
            read, read_keys = np.frombuffer(tokens, np.uint32), np.frombuffer(keys, np.uint64)
            origin = Origin(source, time, is_corpus=bool(is_corpus))
            yield StoredText(read, n_lead, answer, origin, read_keys, id)
