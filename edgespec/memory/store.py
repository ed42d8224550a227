"""The texts of a data folder without an engine: what commands add, list, export and remove."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from edgespec.memory import rows
from edgespec.memory.corpus import Corpus
from edgespec.memory.database import Database
from edgespec.memory.removal import remove_texts
from edgespec.memory.texts import Kind, SpaceKey, StoredText

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
    n_texts: int
    n_tokens: int
    n_corpus_tokens: int
    n_documents: int
    n_segments: int
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


class TextStore:
    """All stored texts, of all tokenizers and namespaces. Every method raises CacheError.

    `notice` is a sentence about a damaged file that was set aside, else None.
    """

    def __init__(self, database: Database) -> None:
        """Use `open`."""
        self._database = database
        self.notice = database.notice

    @classmethod
    def open(cls, folder: Path, *, wait_s: float = 5.0) -> Self:
        """The memory in `folder`, created if missing; waits up to `wait_s` for other processes."""
        return cls(Database.open(folder, wait_s))

    def close(self) -> None:
        self._database.close()

    def open_corpus(self, tokenizer: str, namespace: str = "", limit_bytes: int = DEFAULT_LIMIT_BYTES) -> Corpus:
        """The documents of a tokenizer and namespace, to add some. The next engine that is idle indexes them."""
        return Corpus(self._database, SpaceKey(tokenizer, namespace), limit_bytes)

    def name_tokenizer(self, tokenizer: str, model: str) -> None:
        """Remember a model that has this tokenizer, by the name that its user knows."""
        rows.name_tokenizer(self._database, tokenizer, model)

    def forget(self, source: str) -> int:
        """Remove all texts of a source, in every namespace; returns their number of tokens.

        No byte of them is left in the folder. Engines that run drop them at the start of their next generation.
        """
        name = rows.clean_source(source)
        return self._remove("t.source = ?", (name,), (None, name))

    def forget_path(self, path: Path) -> int:
        """Remove the document at an absolute path, or all below a folder; returns their number of tokens.

        See `forget`.
        """
        condition, parameters = rows.match_documents(path)
        return self._remove(condition, parameters, (None, rows.name_document(path)))

    def clear(self, namespace: str | None = None, *, only_documents: bool = False) -> int:
        """Remove all texts, or those of a namespace; returns their number of tokens. See `forget`."""
        condition = "t.space IN (SELECT id FROM spaces WHERE namespace = coalesce(?, namespace))"
        if only_documents:  # no text that is still to be stored has an empty source
            return self._remove(f"t.is_corpus AND {condition}", (namespace,), (namespace, ""))
        return self._remove(condition, (namespace,), (namespace, None))

    def status(self) -> list[SpaceStatus]:
        """What is stored, the tokenizer and namespace with the newest text first."""
        query = (
            "SELECT tokenizer, (SELECT name FROM models WHERE tokenizer = spaces.tokenizer), namespace, count(*),"
            " sum(length(tokens) / 4 - n_lead), sum((length(tokens) / 4 - n_lead) * is_corpus),"
            " count(DISTINCT CASE WHEN is_corpus THEN source END),"
            " (SELECT count(*) FROM segments WHERE space = spaces.id),"
            " (SELECT coalesce(sum(bytes), 0) FROM segments WHERE space = spaces.id), max(time)"
            " FROM spaces JOIN texts ON texts.space = spaces.id GROUP BY spaces.id ORDER BY max(texts.id) DESC"
        )
        with self._database.read() as db:
            return [SpaceStatus(*row) for row in db.execute(query)]

    def size(self) -> int:
        """Bytes of all files in the folder."""
        total = 0
        with self._database.read():
            for path in self._database.folder.iterdir():
                with suppress(FileNotFoundError):  # engines remove segments
                    total += path.stat().st_size
        return total

    def export(self) -> Iterator[Record]:
        """All texts in the order of storing. A block that a turn has not filled comes again with the next turn."""
        with self._database.read() as db:
            query = (
                "SELECT texts.id, tokenizer, namespace FROM texts JOIN spaces ON spaces.id = space ORDER BY texts.id"
            )
            found = db.execute(query).fetchall()
        for id, tokenizer, namespace in found:
            key = SpaceKey(tokenizer, namespace)
            for text in rows.read_texts(self._database, key, id, id):
                for kind, tokens in text.parts():
                    yield Record(key.tokenizer, key.namespace, kind, text.origin.source, text.origin.time, tokens)

    def texts(self, tokenizer: str, namespace: str = "") -> Iterator[StoredText]:
        """The texts of a tokenizer and namespace in the order of storing, without damaged ones."""
        key = SpaceKey(tokenizer, namespace)
        first = 0
        while ids := rows.list_ids(self._database, key, first, _PAGE):
            yield from rows.read_texts(self._database, key, first, ids[-1])
            first = ids[-1] + 1

    def count_answers(self, tokenizer: str, since_s: float, namespace: str = "") -> int:
        """The tokens of answers that were stored after a time, in seconds since the epoch."""
        query = (
            "SELECT coalesce(sum(max(length(tokens) / 4 - max(n_lead, answer), 0)), 0) FROM texts"
            " JOIN spaces ON spaces.id = space WHERE tokenizer = ? AND namespace = ? AND time > ? AND NOT is_corpus"
        )
        with self._database.read() as db:
            return int(db.execute(query, (tokenizer, namespace, since_s)).fetchone()[0])

    def _remove(self, condition: str, parameters: Sequence[object], forgotten: tuple[str | None, str | None]) -> int:
        """Remove the texts that meet an SQL condition; `forgotten` is what it means: the namespace, the source."""
        names = [None if name is None else rows.hash_name(name) for name in forgotten]
        with self._database.write() as db:
            db.execute("INSERT INTO forgotten (namespace, source) VALUES (?, ?)", names)
            n = remove_texts(db, condition, parameters)
            of_namespace = "SELECT id FROM spaces WHERE namespace = coalesce(?, namespace)"
            db.execute(f"DELETE FROM learned WHERE space IN ({of_namespace})", forgotten[:1])
            db.execute("DELETE FROM spaces WHERE id NOT IN (SELECT space FROM texts UNION SELECT space FROM learned)")
            db.execute("DELETE FROM models WHERE tokenizer NOT IN (SELECT tokenizer FROM spaces)")
        self._database.scrub()
        return n
