"""The texts of a data folder without an engine: what commands add, list, export and remove."""

from __future__ import annotations

import sqlite3
import stat
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from edgespec.files import stat_files
from edgespec.memory import database as rows
from edgespec.memory.database import Database
from edgespec.memory.prefixes import remove_prefixes
from edgespec.memory.texts import BLOCK, Kind, Origin, SpaceKey, StoredText, block_keys, split_new

# Texts are removed: those that are forgotten, and those that were of no use for longest.


_WORDS = 3  # for a token: one in the database, two in a segment
BYTES = 4 * _WORDS
"""What a token takes."""
_ROW_BYTES = 100  # of a text's other columns
_REMAINING = 0.9  # of the limit, after texts were removed


def remove_texts(db: sqlite3.Connection, condition: str, parameters: Sequence[object]) -> int:
    """Delete the texts that meet an SQL condition, and their segments with the later ones, which are built again.

    Engines read again which texts are stored. Returns the number of tokens.
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
    """Remove texts, those used longest ago first, where all of them and their segments need more than `limit_bytes`.

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


# Documents are added to the stored texts; a document that has changed replaces its earlier version.


SHARE = 0.5
"""The part of the memory that documents may take."""


class NoRoom(Exception):
    """Documents have their share of the memory."""


class Corpus:
    """The documents of one tokenizer and namespace. Every method raises CacheError."""

    def __init__(self, database: Database, key: SpaceKey, limit_bytes: int) -> None:
        self._database = database
        self._key = key
        self._limit_bytes = limit_bytes
        self._known = rows.read_keys(database, key)
        self._has_removed = False
        self._n_free = int(SHARE * limit_bytes) // BYTES - rows.count_corpus_tokens(database)

    def add(self, path: Path, document: Sequence[int]) -> int:
        """Store the tokens of the document at an absolute path, in place of what it had before.

        Returns the number of tokens that are new. Raises NoRoom.
        """
        source, tokens = rows.clean_source(str(path)), np.array(document, np.uint32)
        keys = block_keys(tokens)
        self._remove_outdated(source, keys)
        if min(BLOCK * sum(key not in self._known for key in keys), len(tokens)) > self._n_free:
            raise NoRoom
        origin = Origin(source, time.time(), rows.read_epoch(self._database), is_corpus=True)
        new = split_new(tokens, len(tokens), self._known, origin)
        rows.add_texts(self._database, self._key, new)
        n_new = sum(len(text.tokens) - text.n_lead for text in new)
        self._n_free -= n_new
        return n_new

    def remove_missing(self, path: Path) -> int:
        """Remove the documents at an absolute path or below it whose files are gone; returns how many these are."""
        gone = [each for each in rows.list_documents(self._database, self._key, path) if not Path(each).exists()]
        for source in gone:
            self._remove_outdated(source, ())
        return len(gone)

    def finish(self) -> None:
        """Remove what is beyond the limit of the memory, the texts used longest ago first, and what was replaced.

        No byte of earlier versions is left in the folder.
        """
        age_out(self._database, self._limit_bytes)
        if self._has_removed:
            self._database.scrub()

    def _remove_outdated(self, source: str, keys: Sequence[int]) -> None:
        """Remove the texts of `source` that have a block which is not among `keys`."""
        stored = rows.read_source_keys(self._database, self._key, source)
        outdated = {id: old for id, old in stored.items() if not old.issubset(keys)}
        if not outdated:
            return
        with self._database.write() as db:
            self._n_free += remove_texts(db, f"t.id IN ({', '.join(map(str, outdated))})", ())
        self._known.difference_update(*outdated.values())
        self._has_removed = True


DEFAULT_LIMIT_BYTES = 512 * 2**20
_PAGE = 256  # texts that are read at once


@dataclass(frozen=True, slots=True)
class SpaceStatus:
    """What is stored of one tokenizer and namespace.

    model          a model with this tokenizer; None where it is not known
    n_documents    sources of its corpus
    segment_bytes  of its segment files
    newest         when its last text was stored, in seconds since the epoch
    """

    tokenizer: str
    model: str | None
    namespace: str
    n_tokens: int
    n_corpus_tokens: int
    n_documents: int
    segment_bytes: int
    newest: float


@dataclass(frozen=True, slots=True)
class Record:
    """A stored part of a text, of one kind."""

    tokenizer: str
    namespace: str
    kind: Kind
    source: str | None
    time: float
    tokens: list[int]


class TextStore(Database):
    """All stored texts, of all tokenizers and namespaces. Every method raises CacheError."""

    def open_corpus(self, tokenizer: str, namespace: str = "", limit_bytes: int = DEFAULT_LIMIT_BYTES) -> Corpus:
        """The documents of a tokenizer and namespace, to add some. The next engine that is idle indexes them."""
        return Corpus(self, SpaceKey(tokenizer, namespace), limit_bytes)

    def forget(self, source: str) -> int:
        """Remove all texts of a source, in every namespace; returns their number of tokens.

        No byte of them is left in the folder. Engines that run drop them at the start of their next generation.
        """
        return self._remove("t.source = ?", (rows.clean_source(source),))

    def forget_path(self, path: Path) -> int:
        """Remove the document at an absolute path, or all below a folder; returns their number of tokens.

        See `forget`.
        """
        condition, parameters = rows.match_documents(path)
        return self._remove(condition, parameters)

    def clear(self, namespace: str | None = None, *, only_documents: bool = False) -> int:
        """Remove all texts, or those of a namespace; returns their number of tokens. See `forget`."""
        condition = "t.space IN (SELECT id FROM spaces WHERE namespace = coalesce(?, namespace))"
        if only_documents:
            condition += " AND t.is_corpus"
        return self._remove(condition, (namespace,), namespace)

    def status(self) -> list[SpaceStatus]:
        """What is stored, the tokenizer and namespace with the newest text first."""
        query = (
            "SELECT tokenizer, (SELECT name FROM models WHERE tokenizer = spaces.tokenizer), namespace,"
            " sum(length(tokens) / 4 - n_lead), sum((length(tokens) / 4 - n_lead) * is_corpus),"
            " count(DISTINCT CASE WHEN is_corpus THEN source END),"
            " (SELECT coalesce(sum(bytes), 0) FROM segments WHERE space = spaces.id), max(time)"
            " FROM spaces JOIN texts ON texts.space = spaces.id GROUP BY spaces.id ORDER BY max(texts.id) DESC"
        )
        return [SpaceStatus(*row) for row in self.query(query)]

    def size(self) -> int:
        """Bytes of all files of the texts."""
        with self.read():
            files = stat_files(self.folder.iterdir()).values()
        return sum(found.st_size for found in files if stat.S_ISREG(found.st_mode))

    def export(self) -> Iterator[Record]:
        """All texts, those of a tokenizer and namespace in the order of storing.

        A block that a turn has not filled comes again with the next turn.
        """
        for tokenizer, namespace in self.query("SELECT tokenizer, namespace FROM spaces ORDER BY id"):
            for text in self.texts(tokenizer, namespace):
                for kind, tokens in text.parts():
                    yield Record(tokenizer, namespace, kind, text.origin.source, text.origin.time, tokens)

    def texts(self, tokenizer: str, namespace: str = "") -> Iterator[StoredText]:
        """The texts of a tokenizer and namespace in the order of storing, without damaged ones."""
        first = 0
        while page := rows.read_texts(self, SpaceKey(tokenizer, namespace), first, limit=_PAGE):
            yield from page
            first = page[-1].id + 1

    def count_answers(self, tokenizer: str, since_s: float, namespace: str = "") -> int:
        """The tokens of answers that were stored after a time, in seconds since the epoch."""
        query = (
            "SELECT coalesce(sum(max(length(tokens) / 4 - max(n_lead, answer), 0)), 0) FROM texts"
            " JOIN spaces ON spaces.id = space WHERE tokenizer = ? AND namespace = ? AND time > ? AND NOT is_corpus"
        )
        return int(self.query(query, tokenizer, namespace, since_s)[0][0])

    def _remove(self, condition: str, parameters: Sequence[object], namespace: str | None = None) -> int:
        """Remove the texts that meet an SQL condition, and what was learned from all texts of the namespace."""
        with self.write() as db:
            n = remove_texts(db, condition, parameters)
            of_namespace = "SELECT id FROM spaces WHERE namespace = coalesce(?, namespace)"
            db.execute(f"DELETE FROM learned WHERE space IN ({of_namespace})", (namespace,))
            db.execute("DELETE FROM spaces WHERE id NOT IN (SELECT space FROM texts UNION SELECT space FROM learned)")
            db.execute("DELETE FROM models WHERE tokenizer NOT IN (SELECT tokenizer FROM spaces)")
        remove_prefixes(self.folder)  # which may hold them
        self.scrub()
        return n
