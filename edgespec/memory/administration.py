"""The texts of a data folder without an engine, as commands list, export and remove them."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.files import stat_files
from edgespec.memory import queries
from edgespec.memory.corpus import Corpus
from edgespec.memory.database import Database
from edgespec.memory.prefix_files import remove_prefixes
from edgespec.memory.removal import remove_texts
from edgespec.memory.texts import Kind, SpaceKey, StoredText

DEFAULT_LIMIT_BYTES = 512 * 2**20
_PAGE = 256  # texts that are read at once


@dataclass(frozen=True, slots=True)
class SpaceStatus:
    """What is stored of one tokenizer and namespace.

    model          a model with this tokenizer; None if it is not known
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
        return self._remove("t.source = ?", (queries.clean_source(source),))

    def forget_path(self, path: Path) -> int:
        """Remove the document at an absolute path, or all below a folder; returns their number of tokens.

        See `forget`.
        """
        condition, parameters = queries.match_documents(path)
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
        while page := queries.read_texts(self, SpaceKey(tokenizer, namespace), first, limit=_PAGE):
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
