"""Documents among the stored texts; one that has changed replaces its earlier version."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgespec.memory import queries
from edgespec.memory.database import Database
from edgespec.memory.removal import BYTES, age_out, remove_texts
from edgespec.memory.texts import BLOCK, Origin, SpaceKey, block_keys, split_new

SHARE = 0.5
"""The part of the memory that documents may take."""


class NoRoom(Exception):
    """A document does not fit into the share of the memory that documents may take."""


class Corpus:
    """The documents of one tokenizer and namespace. Every method raises CacheError."""

    def __init__(self, database: Database, key: SpaceKey, limit_bytes: int) -> None:
        self._database = database
        self._key = key
        self._limit_bytes = limit_bytes
        self._known = queries.read_keys(database, key)
        self._has_removed = False
        self._n_free = int(SHARE * limit_bytes) // BYTES - queries.count_corpus_tokens(database)

    def add(self, path: Path, document: Sequence[int]) -> int:
        """Store the tokens of the document at an absolute path, in place of what it had before.

        Returns the number of tokens that are new. Raises NoRoom.
        """
        source, tokens = queries.clean_source(str(path)), np.array(document, np.uint32)
        keys = block_keys(tokens)
        self._remove_outdated(source, keys)
        if min(BLOCK * sum(key not in self._known for key in keys), len(tokens)) > self._n_free:
            raise NoRoom
        origin = Origin(source, time.time(), queries.read_epoch(self._database), is_corpus=True)
        new = split_new(tokens, len(tokens), self._known, origin)
        queries.add_texts(self._database, self._key, new)
        n_new = sum(len(text.tokens) - text.n_lead for text in new)
        self._n_free -= n_new
        return n_new

    def remove_missing(self, path: Path) -> int:
        """Remove the documents at an absolute path or below it whose files are gone; returns how many these are."""
        gone = [each for each in queries.list_documents(self._database, self._key, path) if not Path(each).exists()]
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
        stored = queries.read_source_keys(self._database, self._key, source)
        outdated = {id: old for id, old in stored.items() if not old.issubset(keys)}
        if not outdated:
            return
        with self._database.write() as db:
            self._n_free += remove_texts(db, f"t.id IN ({', '.join(map(str, outdated))})", ())
        self._known.difference_update(*outdated.values())
        self._has_removed = True
