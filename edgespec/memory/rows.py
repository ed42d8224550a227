"""What an engine reads and writes in the database: texts of a space, their segments, and what drafters have learned."""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from edgespec.files import write_private
from edgespec.memory.database import SEGMENT_SUFFIX, Database
from edgespec.memory.texts import Keys, Origin, SpaceKey, StoredText

_SEGMENT = "name, first, last, n_tokens"
_SPACE = "(SELECT id FROM spaces WHERE tokenizer = ? AND namespace = ?)"


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """A segment file: an index of all texts with ids from first to last."""

    name: str
    first: int
    last: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """A segment of all texts with ids from `first` to `last`, in place of others."""

    first: int
    last: int
    n_tokens: int
    replaced: tuple[SegmentRow, ...]


def read_epoch(database: Database) -> int:
    """How many times texts have been forgotten. Raises CacheError, as everything here."""
    with database.read() as db:
        return int(db.execute("SELECT coalesce(max(id), 0) FROM forgotten").fetchone()[0])


def add_texts(database: Database, key: SpaceKey, texts: Sequence[StoredText]) -> None:
    """Store texts and set their ids; -1 for those that are not stored, because they were forgotten meanwhile."""
    ids = []
    with database.write() as db:
        db.execute("INSERT OR IGNORE INTO spaces (tokenizer, namespace) VALUES (?, ?)", _columns(key))
        for text in texts:
            ids.append(-1 if _is_forgotten(db, key, text) else _insert(db, key, text))
    for text, id in zip(texts, ids, strict=True):
        text.id = id


def read_texts(database: Database, key: SpaceKey, first: int, last: int) -> list[StoredText]:
    """The texts with ids from `first` to `last`, in that order, without damaged ones."""
    columns = "tokens, n_lead, answer, is_corpus, source, time, keys, id, checksum"
    query = f"SELECT {columns} FROM texts WHERE space = {_SPACE} AND id BETWEEN ? AND ? ORDER BY id"
    with database.read() as db:
        return list(_to_texts(db.execute(query, (*_columns(key), first, last))))


def list_ids(database: Database, key: SpaceKey, first: int, limit: int) -> list[int]:
    """The ids of texts from `first` on, `limit` at most, in rising order."""
    query = f"SELECT id FROM texts WHERE space = {_SPACE} AND id >= ? ORDER BY id LIMIT ?"
    with database.read() as db:
        return [id for (id,) in db.execute(query, (*_columns(key), first, limit))]


def list_unindexed(database: Database, key: SpaceKey) -> list[tuple[int, int]]:
    """(id, number of tokens) of every text that is in no segment, by id."""
    inside = "SELECT 1 FROM segments WHERE space = texts.space AND texts.id BETWEEN first AND last"
    query = f"SELECT id, length(tokens) / 4 FROM texts WHERE space = {_SPACE} AND NOT EXISTS ({inside}) ORDER BY id"
    with database.read() as db:
        return db.execute(query, _columns(key)).fetchall()


def read_keys(database: Database, key: SpaceKey) -> Keys:
    """The keys of all blocks."""
    with database.read() as db:
        rows = db.execute(f"SELECT keys FROM texts WHERE space = {_SPACE}", _columns(key)).fetchall()
    return np.frombuffer(b"".join(keys for (keys,) in rows), np.uint64)


def read_source_keys(database: Database, key: SpaceKey, source: str) -> list[tuple[int, Keys]]:
    """(id, keys of the blocks) of every text of a source."""
    query = f"SELECT id, keys FROM texts WHERE source = ? AND space = {_SPACE}"
    with database.read() as db:
        found = db.execute(query, (source, *_columns(key))).fetchall()
    return [(id, np.frombuffer(keys, np.uint64)) for id, keys in found]


def list_documents(database: Database, key: SpaceKey, path: Path) -> list[str]:
    """The sources of the documents at an absolute path and below it."""
    condition, parameters = match_documents(path)
    query = f"SELECT DISTINCT source FROM texts t WHERE {condition} AND space = {_SPACE}"
    with database.read() as db:
        return [source for (source,) in db.execute(query, (*parameters, *_columns(key)))]


def match_documents(path: Path) -> tuple[str, tuple[str, ...]]:
    """The SQL condition, with its parameters, for the documents `t` at an absolute path and below it."""
    source = name_document(path)
    below = source if source.endswith(os.sep) else source + os.sep
    return "t.is_corpus AND (t.source = ? OR substr(t.source, 1, length(?)) = ?)", (source, below, below)


def name_document(path: Path) -> str:
    """The source of the document at an absolute path: the path, without bytes that are no text."""
    return os.fsencode(path).decode("utf-8", "replace")


def clean_source(source: str) -> str:
    """A source as it is stored: without lone surrogates, which SQLite refuses."""
    return source.encode("utf-8", "replace").decode()


def count_corpus_tokens(database: Database) -> int:
    """The tokens of all documents."""
    with database.read() as db:
        query = "SELECT coalesce(sum(length(tokens) / 4 - n_lead), 0) FROM texts WHERE is_corpus"
        return int(db.execute(query).fetchone()[0])


def name_tokenizer(database: Database, tokenizer: str, model: str) -> None:
    """Remember a model that has this tokenizer, by the name that its user knows."""
    with database.write() as db:
        update = "DO UPDATE SET name = excluded.name WHERE name <> excluded.name"
        db.execute(f"INSERT INTO models (tokenizer, name) VALUES (?, ?) ON CONFLICT {update}", (tokenizer, model))


def mark_used(database: Database, ids: Iterable[int]) -> None:
    """These texts have been of use, and are kept longer."""
    with database.write() as db:
        statement = "REPLACE INTO uses (text, used) SELECT id, (SELECT max(id) FROM texts) FROM texts WHERE id = ?"
        db.executemany(statement, [(id,) for id in ids])


def list_segments(database: Database, key: SpaceKey) -> list[SegmentRow]:
    """The segments, by id of their texts; no two of them have the same text."""
    query = f"SELECT {_SEGMENT} FROM segments WHERE space = {_SPACE} ORDER BY first"
    with database.read() as db:
        return [SegmentRow(*row) for row in db.execute(query, _columns(key))]


def add_segment(database: Database, key: SpaceKey, plan: BuildPlan, data: bytes, epoch: int) -> None:
    """Write a segment file as planned, of `build_segment`.

    Nothing is written where texts were forgotten since `epoch`, or another process has built segments of these texts.
    """
    inside = f"space = {_SPACE} AND last >= ? AND first <= ?"
    name = f"{plan.first}-{plan.last}-{os.urandom(8).hex()}{SEGMENT_SUFFIX}"
    with database.write() as db:
        found = db.execute(f"SELECT {_SEGMENT} FROM segments WHERE {inside}", (*_columns(key), plan.first, plan.last))
        if read_epoch(database) != epoch or {SegmentRow(*row) for row in found} != set(plan.replaced):
            return
        write_private(database.folder / name, data)
        db.executemany("DELETE FROM segments WHERE name = ?", [(each.name,) for each in plan.replaced])
        db.execute(
            f"INSERT INTO segments (name, space, first, last, n_tokens, bytes) VALUES (?, {_SPACE}, ?, ?, ?, ?)",
            (name, *_columns(key), plan.first, plan.last, plan.n_tokens, len(data)),
        )
    _remove_files(database, plan.replaced)


def drop_segments(database: Database, segments: Sequence[SegmentRow]) -> None:
    """Remove damaged segments."""
    with database.write() as db:
        db.executemany("DELETE FROM segments WHERE name = ?", [(each.name,) for each in segments])
    _remove_files(database, segments)


def read_learned(database: Database, key: SpaceKey, name: str) -> bytes | None:
    """What was saved under `name`."""
    query = f"SELECT data FROM learned WHERE space = {_SPACE} AND name = ?"
    with database.read() as db:
        row = db.execute(query, (*_columns(key), name)).fetchone()
    return row and bytes(row[0])


def save_learned(database: Database, key: SpaceKey, name: str, data: bytes, epoch: int) -> None:
    """Save `data` under `name`, unless texts were forgotten since `epoch`."""
    with database.write() as db:
        if read_epoch(database) == epoch:
            db.execute("INSERT OR IGNORE INTO spaces (tokenizer, namespace) VALUES (?, ?)", _columns(key))
            db.execute(
                f"REPLACE INTO learned (space, name, data) VALUES ({_SPACE}, ?, ?)", (*_columns(key), name, data)
            )


def hash_name(name: str) -> str:
    """A namespace or source as the table of forgotten texts has it."""
    return blake2b(name.encode(), digest_size=16).hexdigest()


def _remove_files(database: Database, segments: Iterable[SegmentRow]) -> None:
    for segment in segments:
        with suppress(OSError):
            (database.folder / segment.name).unlink(missing_ok=True)


def _insert(db: sqlite3.Connection, key: SpaceKey, text: StoredText) -> int:
    tokens, origin = text.tokens.tobytes(), text.origin
    statement = (
        "INSERT INTO texts (space, source, is_corpus, time, n_lead, answer, checksum, keys, tokens)"
        f" VALUES ({_SPACE}, ?, ?, ?, ?, ?, ?, ?, ?)"
    )
    said = (origin.source, origin.is_corpus, origin.time, text.n_lead, text.answer)
    row = db.execute(statement, (*_columns(key), *said, zlib.crc32(tokens), text.keys.tobytes(), tokens))
    assert row.lastrowid is not None
    return row.lastrowid


def _is_forgotten(db: sqlite3.Connection, key: SpaceKey, text: StoredText) -> bool:
    query = (
        "SELECT 1 FROM forgotten WHERE id > ? AND (namespace IS NULL OR namespace = ?)"
        " AND (source IS NULL OR source = ?) LIMIT 1"
    )
    source = None if text.origin.source is None else hash_name(text.origin.source)
    return db.execute(query, (text.origin.epoch, hash_name(key.namespace), source)).fetchone() is not None


def _to_texts(rows: Iterable[tuple[bytes, int, int, int, str | None, float, bytes, int, int]]) -> Iterator[StoredText]:
    for tokens, n_lead, answer, is_corpus, source, time, keys, id, checksum in rows:
        if zlib.crc32(tokens) == checksum:
            read, read_keys = np.frombuffer(tokens, np.uint32), np.frombuffer(keys, np.uint64)
            origin = Origin(source, time, is_corpus=bool(is_corpus))
            yield StoredText(read, n_lead, answer, origin, read_keys, id)


def _columns(key: SpaceKey) -> tuple[str, str]:
    return key.tokenizer, key.namespace
