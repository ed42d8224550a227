"""The store of conversations. Each call is one short transaction, so several processes can share the file."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from edgespec.chat.conversation import Conversation, Role, Spans, Turn, drop_surrogates, make_title
from edgespec.chat.remembered import forget_conversation
from edgespec.chat.search import SearchHit, matches, snippet, split_words
from edgespec.databases import IN_MEMORY, Layout, SharedDatabase
from edgespec.errors import CacheError, InvalidRequest
from edgespec.folders import data_folder
from edgespec.text.tool_calls import load_json

_LAYOUT = Layout(
    4,
    ("foreign_keys = ON", "secure_delete = ON", "synchronous = NORMAL"),
    (
        "CREATE TABLE IF NOT EXISTS conversations (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT,"
        " model TEXT NOT NULL, system TEXT, leaf INTEGER, created REAL NOT NULL, changed REAL NOT NULL)",
        "CREATE TABLE IF NOT EXISTS turns (id INTEGER PRIMARY KEY AUTOINCREMENT,"
        " conversation INTEGER NOT NULL REFERENCES conversations, parent INTEGER REFERENCES turns,"
        " role TEXT NOT NULL CHECK (role IN ('user', 'assistant')), text TEXT NOT NULL, reasoning TEXT NOT NULL,"
        " spans TEXT NOT NULL, settings TEXT NOT NULL, metrics TEXT NOT NULL, finished INTEGER NOT NULL,"
        " created REAL NOT NULL)",
        "CREATE INDEX IF NOT EXISTS turns_by_conversation ON turns (conversation)",
        "CREATE INDEX IF NOT EXISTS turns_by_parent ON turns (parent)",
        # Of texts that were saved since version 4.
        "CREATE TABLE IF NOT EXISTS checksums (turn INTEGER PRIMARY KEY REFERENCES turns ON DELETE CASCADE,"
        " value INTEGER NOT NULL)",
        # The index of searches that version 2 has.
        "DROP TRIGGER IF EXISTS reopened",
        "DROP INDEX IF EXISTS turns_unfinished",
        "DROP TABLE IF EXISTS folded",
    ),
)
_TURN_COLUMNS = "id, conversation, parent, role, text, reasoning, spans, settings, metrics, finished, created"
_TURN = f"SELECT {_TURN_COLUMNS} FROM turns"
_CONVERSATION = (
    "SELECT id, name, model, system, leaf, created, changed, (SELECT text FROM turns"
    " WHERE conversation = conversations.id AND role = 'user' ORDER BY id LIMIT 1) FROM conversations"
)
_NOT_EMPTY = "(role = 'user' OR text <> '' OR reasoning <> '')"  # an answer that has not begun is no branch


def _read_conversation(row: tuple[Any, ...]) -> Conversation:
    id, name, *rest, first = row
    title = make_title((first or "")[:500]) if name is None else name
    return Conversation(id, title, name is not None, *rest)


def _read_turn(row: tuple[Any, ...]) -> Turn:
    id, conversation, parent, role, text, reasoning, spans, settings, metrics, finished, created = row
    values = load_json(spans, []), load_json(settings, {}), load_json(metrics, {})
    return Turn(id, conversation, parent, role, text, reasoning, *values, bool(finished), created)


def _to_column(value: Any) -> str:
    """`value` as JSON text. Raises ValueError or TypeError for values that are not JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _checksum(text: str, reasoning: str) -> int:
    """CRC-32 of the texts of a turn."""
    return zlib.crc32(f"{text}\0{reasoning}".encode("utf-8", "surrogatepass"))


class Store(SharedDatabase):
    """The conversations of one file.

    Every method raises CacheError if the file cannot be read or written, or if its conversation or turn was removed;
    nothing changes then, and the caller can continue without saving.
    """

    def __init__(self, path: Path, wait_s: float = 0.0) -> None:
        """Use `open` or `in_memory`."""
        super().__init__(path, _LAYOUT, wait_s)

    @classmethod
    def open(cls, path: Path | None = None, *, wait_s: float = 3.0) -> Self:
        """The file at `path`, by default conversations.db in `data_folder()`; waits up to `wait_s` for locks."""
        return cls(path or data_folder() / "conversations.db", wait_s)

    @classmethod
    def in_memory(cls) -> Self:
        """A store that is lost when the program ends."""
        return cls(IN_MEMORY)

    def new(self, model: str, system: str | None = None) -> Conversation:
        """Create a conversation without turns; lists show it from its first turn on."""
        now = time.time()
        return self._insert(Conversation(0, "", False, model, system, None, now, now))

    def add(
        self,
        conversation: Conversation,
        parent: Turn | None,
        role: Role,
        text: str,
        settings: Mapping[str, Any] | None = None,
    ) -> Turn:
        """Add a turn after `parent`, which is None for the first turn. It becomes the end of the current branch.

        A user's turn is finished; an assistant's is to be grown and finished. Raises ValueError or TypeError for
        settings that are not JSON.
        """
        now = time.time()
        after = parent.id if parent else None
        turn = Turn(0, conversation.id, after, role, text, "", [], settings or {}, {}, role == "user", now)
        with self.write() as db:
            self._conversation(conversation.id)
            id = self._insert_turn(turn)
            db.execute("UPDATE conversations SET leaf = ?, changed = ? WHERE id = ?", (id, now, conversation.id))
            return self._turn(id)

    def grow(self, turn: Turn, text: str, reasoning: str = "", spans: Spans = ()) -> Turn:
        """Save the text of a turn that is being generated, so that it survives the end of the process.

        Raises ValueError or TypeError for spans that are not JSON.
        """
        return self._rewrite(turn, text, reasoning, spans, {}, finished=False)

    def finish(
        self,
        turn: Turn,
        text: str,
        reasoning: str = "",
        spans: Spans = (),
        metrics: Mapping[str, Any] | None = None,
    ) -> Turn:
        """Save the final text of a turn; later calls for it raise CacheError.

        Raises ValueError or TypeError for spans or metrics that are not JSON.
        """
        return self._rewrite(turn, text, reasoning, spans, metrics or {}, finished=True)

    def reopen(self, turn: Turn) -> Turn:
        """Let a finished answer grow again."""
        with self.write() as db:
            db.execute("UPDATE turns SET finished = 0 WHERE id = ? AND role = 'assistant'", (turn.id,))
            return self._turn(turn.id)

    def path(self, leaf: Turn | int | None) -> list[Turn]:
        """The turns from the first to `leaf`, a turn or its id; empty for None or an unknown id."""
        query = (
            "WITH RECURSIVE up (id, parent) AS (SELECT id, parent FROM turns WHERE id = ?"
            " UNION SELECT turns.id, turns.parent FROM turns JOIN up ON turns.id = up.parent)"
            f" {_TURN} WHERE id IN (SELECT id FROM up) ORDER BY id"
        )
        return self._turns(query, leaf.id if isinstance(leaf, Turn) else leaf)

    def turns(self, conversation: Conversation) -> list[Turn]:
        """All turns of all branches, parents first."""
        return self._turns(f"{_TURN} WHERE conversation = ? ORDER BY id", conversation.id)

    def count_changed(self, conversation: Conversation) -> int:
        """Count the turns whose text is not what was saved: the disk or another program has changed it."""
        query = "SELECT text, reasoning, value FROM turns JOIN checksums ON turn = id WHERE conversation = ?"
        return sum(_checksum(*texts) != value for *texts, value in self.query(query, conversation.id))

    def branches(self, conversation: Conversation) -> dict[int | None, list[int]]:
        """The ids of the turns after each parent, oldest first; those at the start are after None."""
        found: dict[int | None, list[int]] = {}
        query = f"SELECT parent, id FROM turns WHERE conversation = ? AND {_NOT_EMPTY} ORDER BY id"
        for parent, id in self.query(query, conversation.id):
            found.setdefault(parent, []).append(id)
        return found

    def newest_leaf(self, id: int) -> Turn:
        """The newest descendant of a turn that is not an empty answer, or the turn itself without one."""
        query = (
            "WITH RECURSIVE below (id) AS (SELECT ? UNION SELECT turns.id FROM turns JOIN below ON parent = below.id)"
            f" {_TURN} WHERE id IN (SELECT id FROM below) AND {_NOT_EMPTY} ORDER BY id DESC LIMIT 1"
        )
        found = self._turns(query, id)
        return found[0] if found else self._turn(id)

    def select(self, conversation: Conversation, leaf: Turn | None) -> Conversation:
        """Make `leaf` the end of the current branch; None is the start."""
        return self._change(conversation, "leaf", leaf.id if leaf else None)

    def rename(self, conversation: Conversation, title: str) -> Conversation:
        """Set the title, shortened to one line; an empty one restores the title from the first message."""
        return self._change(conversation, "name", make_title(drop_surrogates(title)) if title.strip() else None)

    def set_system(self, conversation: Conversation, system: str | None) -> Conversation:
        return self._change(conversation, "system", None if system is None else drop_surrogates(system))

    def set_model(self, conversation: Conversation, model: str) -> Conversation:
        return self._change(conversation, "model", drop_surrogates(model))

    def remove(self, conversation: Conversation) -> None:
        """Delete a conversation with all its branches, here and in the memory; does nothing if it no longer exists."""
        if not self.is_in_memory:
            forget_conversation(self.file.parent, conversation.id)
        with self.write() as db:
            db.execute("DELETE FROM turns WHERE conversation = ?", (conversation.id,))
            db.execute("DELETE FROM conversations WHERE id = ?", (conversation.id,))

    def resume(self, id: int) -> Conversation:
        """Read a conversation. Raises InvalidRequest for an unknown id."""
        for found in self._conversations("WHERE id = ?", id) if 0 < id < 2**63 else ():
            return found
        raise InvalidRequest(f"there is no conversation {id}.", hint="`edgespec history` lists the conversations.")

    def recent(self, limit: int = 50) -> list[Conversation]:
        """The conversations that have turns, most recently changed first."""
        has_turns = "EXISTS (SELECT 1 FROM turns WHERE conversation = conversations.id)"
        return self._conversations(f"WHERE {has_turns} ORDER BY changed DESC, id DESC LIMIT ?", limit)

    def search(self, text: str, limit: int = 50) -> list[SearchHit]:
        """The conversations whose title or one turn contains all words of `text`, most recently changed first.

        Also matches inside of words and ignores case; reasoning is not searched.
        """
        words = split_words(text)
        if not words:
            return []
        newest: dict[int, tuple[int, str]] = {}  # the last turn of each conversation that matches
        with self.read() as db:
            for id, conversation, content in db.execute("SELECT id, conversation, text FROM turns ORDER BY id"):
                if matches(content, words):
                    newest[conversation] = id, content
        found: list[SearchHit] = []
        for each in self.recent(-1):
            if each.id in newest:
                turn, content = newest[each.id]
                found.append(SearchHit(each, turn, snippet(content, words)))
            elif each.renamed and matches(each.title, words):
                found.append(SearchHit(each, None, snippet(each.title, words)))
        return found[:limit]

    def insert(self, conversation: Conversation, turns: Iterable[Turn]) -> Conversation:
        """Add an imported conversation with new ids; parents come before their children in `turns`.

        Raises KeyError for a parent or leaf that is not one of `turns`.
        """
        with self.write() as db:
            inserted = self._insert(conversation)
            ids: dict[int | None, int | None] = {None: None}
            for turn in turns:
                ids[turn.id] = self._insert_turn(replace(turn, conversation=inserted.id, parent=ids[turn.parent]))
            db.execute("UPDATE conversations SET leaf = ? WHERE id = ?", (ids[conversation.leaf], inserted.id))
            return self._conversation(inserted.id)

    def _insert(self, conversation: Conversation) -> Conversation:
        name = make_title(drop_surrogates(conversation.title)) if conversation.renamed else None
        system = None if conversation.system is None else drop_surrogates(conversation.system)
        values = name, drop_surrogates(conversation.model), system, conversation.created, conversation.changed
        with self.read() as db:
            statement = "INSERT INTO conversations (name, model, system, created, changed) VALUES (?, ?, ?, ?, ?)"
            return self._conversation(db.execute(statement, values).lastrowid)

    def _insert_turn(self, turn: Turn) -> int:
        """Insert a turn and return its new id. Raises ValueError or TypeError for values that are not JSON."""
        texts = (turn.role, drop_surrogates(turn.text), drop_surrogates(turn.reasoning))
        columns = map(_to_column, (turn.spans, turn.settings, turn.metrics))
        values = turn.conversation, turn.parent, *texts, *columns, turn.finished, turn.created
        with self.read() as db:
            statement = f"INSERT INTO turns ({_TURN_COLUMNS}) VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
            id = db.execute(statement, values).lastrowid or 0
            db.execute("INSERT INTO checksums VALUES (?, ?)", (id, _checksum(*texts[1:])))
            return id

    def _rewrite(
        self, turn: Turn, text: str, reasoning: str, spans: Spans, metrics: Mapping[str, Any], *, finished: bool
    ) -> Turn:
        texts = drop_surrogates(text), drop_surrogates(reasoning)
        values = (*texts, _to_column(spans), _to_column(metrics), finished)
        with self.write() as db:
            columns = "text = ?, reasoning = ?, spans = ?, metrics = ?, finished = ?"
            found = db.execute(f"UPDATE turns SET {columns} WHERE id = ? AND NOT finished", (*values, turn.id))
            rewritten = self._turn(turn.id)
            if not found.rowcount:
                raise CacheError(f"turn {turn.id} is finished already.", hint="Add another turn.")
            db.execute("INSERT OR REPLACE INTO checksums VALUES (?, ?)", (turn.id, _checksum(*texts)))
            db.execute("UPDATE conversations SET changed = ? WHERE id = ?", (time.time(), turn.conversation))
            return rewritten

    def _change(self, conversation: Conversation, column: str, value: str | int | None) -> Conversation:
        with self.write() as db:
            db.execute(f"UPDATE conversations SET {column} = ? WHERE id = ?", (value, conversation.id))
            return self._conversation(conversation.id)

    def _conversations(self, where: str, *values: Any) -> list[Conversation]:
        return list(map(_read_conversation, self.query(f"{_CONVERSATION} {where}", *values)))

    def _conversation(self, id: int | None) -> Conversation:
        for found in self._conversations("WHERE id = ?", id):
            return found
        raise CacheError(f"conversation {id} has been removed.", hint="Start a new conversation.")

    def _turns(self, query: str, *values: Any) -> list[Turn]:
        return list(map(_read_turn, self.query(query, *values)))

    def _turn(self, id: int) -> Turn:
        for found in self._turns(f"{_TURN} WHERE id = ?", id):
            return found
        raise CacheError(f"turn {id} has been removed with its conversation.", hint="Start a new conversation.")
