"""The store of conversations. Each call is one short transaction, so several processes can share the file."""

from __future__ import annotations

import json
import math
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from edgespec.conversations.database import (
    CONVERSATION_COLUMNS,
    TURN_COLUMNS,
    Conversation,
    Role,
    SearchHit,
    Spans,
    Turn,
    data_folder,
    drop_surrogates,
    find_turns,
    forget_conversation,
    index_turn,
    make_title,
    matches,
    open_database,
    prepare,
    snippet,
    split_words,
)
from edgespec.databases import to_cache_error
from edgespec.errors import CacheError, InvalidRequest, reason_of

# Conversion between database rows and conversations and turns.


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


# The tree of a conversation's turns: what follows each turn, and where a branch ends. Empty answers do not count.


_NOT_EMPTY = "(role = 'user' OR text <> '' OR reasoning <> '')"
# The newest descendant of a turn that is not an empty answer.
SELECT_NEWEST_LEAF = (
    "WITH RECURSIVE below (id) AS (SELECT ? UNION SELECT turns.id FROM turns JOIN below ON parent = below.id)"
    f" {SELECT_TURN} WHERE id = (SELECT max(id) FROM turns WHERE id IN (SELECT id FROM below) AND {_NOT_EMPTY})"
)


_LISTED = (
    "WHERE EXISTS (SELECT 1 FROM turns WHERE conversation = conversations.id) ORDER BY changed DESC, id DESC LIMIT ?"
)
_NAMES = (  # a title that the user did not give is a part of the first message
    "SELECT id, coalesce(name, '') FROM conversations"
    " WHERE EXISTS (SELECT 1 FROM turns WHERE conversation = conversations.id) ORDER BY changed DESC, id DESC"
)
_BY_ID = "WHERE id = ?"


class Store:
    """The conversations of one file; only the thread that opened it may use it.

    Every method raises CacheError if the file cannot be read or written, or if its conversation or turn was removed;
    nothing changes then, and the caller can continue without saving. `notice` is a sentence about a damaged file that
    `open` set aside, else None.
    """

    def __init__(self, db: sqlite3.Connection, path: Path, notice: str | None) -> None:
        """Use `open` or `in_memory`."""
        self.notice = notice
        self.is_in_memory = path == Path(":memory:")  # so that everything is lost when the program ends
        self._db, self._path = db, path

    @classmethod
    def open(cls, path: Path | None = None, *, wait_s: float = 3.0) -> Self:
        """The file at `path`, by default conversations.db in `data_folder()`; waits up to `wait_s` for locks.

        Replaces a damaged file by a new one and keeps the old under another name. Raises CacheError.
        """
        path = path or data_folder() / "conversations.db"
        db, notice = open_database(path, wait_s)
        return cls(db, path, notice)

    @classmethod
    def in_memory(cls) -> Self:
        """A store in memory, for use if no file can be opened."""
        db = sqlite3.connect(":memory:", isolation_level=None)
        prepare(db)
        return cls(db, Path(":memory:"), None)

    def close(self) -> None:
        self._db.close()

    def new(self, model: str, system: str | None = None) -> Conversation:
        """Create a conversation without turns; lists show it from its first turn on."""
        now = time.time()
        with self._transaction():
            row = self._db.execute(
                "INSERT INTO conversations (model, system, created, changed) VALUES (?, ?, ?, ?)",
                (drop_surrogates(model), None if system is None else drop_surrogates(system), now, now),
            )
            return self._conversation(row.lastrowid)

    def add(
        self,
        conversation: Conversation,
        parent: Turn | None,
        role: Role,
        text: str,
        settings: Mapping[str, Any] | None = None,
    ) -> Turn:
        """A turn after `parent`, beside what is there already, and the conversation's leaf from now on.

        A user's turn is finished, an assistant's is to be grown and finished. Raises ValueError or TypeError for
        settings that are not JSON.
        """
        now = time.time()
        after = parent.id if parent else None
        turn = Turn(0, conversation.id, after, role, text, "", [], settings or {}, {}, role == "user", now)
        with self._transaction():
            self._conversation(conversation.id)
            id = self._insert_turn(turn)
            self._db.execute("UPDATE conversations SET leaf = ?, changed = ? WHERE id = ?", (id, now, conversation.id))
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
        with self._transaction():
            self._db.execute("UPDATE turns SET finished = 0 WHERE id = ? AND role = 'assistant'", (turn.id,))
            return self._turn(turn.id)

    def path(self, leaf: Turn | int | None) -> list[Turn]:
        """The turns from the first to `leaf`, a turn or its id; empty for None or an unknown id."""
        query = (
            "WITH RECURSIVE up (id, parent) AS (SELECT id, parent FROM turns WHERE id = ?"
            " UNION SELECT turns.id, turns.parent FROM turns JOIN up ON turns.id = up.parent)"
            f" {SELECT_TURN} WHERE id IN (SELECT id FROM up) ORDER BY id"
        )
        return self._turns(query, leaf.id if isinstance(leaf, Turn) else leaf)

    def turns(self, conversation: Conversation) -> list[Turn]:
        """All turns of all branches, parents first."""
        return self._turns(f"{SELECT_TURN} WHERE conversation = ? ORDER BY id", conversation.id)

    def branches(self, conversation: Conversation) -> dict[int | None, list[int]]:
        """The ids of the turns after each parent, oldest first; those at the start are after None."""
        found: dict[int | None, list[int]] = {}
        query = f"SELECT parent, id FROM turns WHERE conversation = ? AND {_NOT_EMPTY} ORDER BY id"
        with self._map_errors():
            for parent, id in self._db.execute(query, (conversation.id,)).fetchall():
                found.setdefault(parent, []).append(id)
        return found

    def newest_leaf(self, id: int) -> Turn:
        """The newest descendant of a turn that is not an empty answer, or the turn itself without one."""
        found = self._turns(SELECT_NEWEST_LEAF, id)
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
            forget_conversation(self._path.with_name("memory"), conversation.id)
        with self._transaction():
            self._db.execute("DELETE FROM turns WHERE conversation = ?", (conversation.id,))
            self._db.execute("DELETE FROM conversations WHERE id = ?", (conversation.id,))

    def resume(self, id: int) -> Conversation:
        """Read a conversation. Raises InvalidRequest for an unknown id."""
        with self._map_errors():
            if 0 < id < 2**63:
                for found in self._conversations(_BY_ID, id):
                    return found
        raise InvalidRequest(f"there is no conversation {id}.", hint="`edgespec history` lists the conversations.")

    def recent(self, limit: int = 50) -> list[Conversation]:
        """The conversations that have turns, most recently changed first."""
        with self._map_errors():
            return list(self._conversations(_LISTED, limit))

    def search(self, text: str, limit: int = 50) -> list[SearchHit]:
        """The conversations whose title or one turn contains all words of `text`, most recently changed first.

        Also matches inside of words and ignores case; reasoning is not searched.
        """
        words = split_words(text)
        found: list[SearchHit] = []
        if not words:
            return found
        with self._map_errors():
            newest = find_turns(self._db, words)
            for id, name in self._db.execute(_NAMES).fetchall():
                turn = newest.get(id)
                content = next(self._db.execute("SELECT text FROM turns WHERE id = ?", (turn,)), (name,))[0]
                if matches(content, words):
                    shown = snippet(content, words)
                    found += [SearchHit(each, turn, shown) for each in self._conversations(_BY_ID, id)]
                if len(found) == limit:
                    break
        return found

    def insert(self, conversation: Conversation, turns: Iterable[Turn]) -> Conversation:
        """Add an imported conversation with new ids; parents come before their children in `turns`.

        Raises KeyError for a parent or leaf that is not one of `turns`.
        """
        with self._transaction():
            name = make_title(drop_surrogates(conversation.title)) if conversation.renamed else None
            system = None if conversation.system is None else drop_surrogates(conversation.system)
            row = self._db.execute(
                "INSERT INTO conversations (name, model, system, created, changed) VALUES (?, ?, ?, ?, ?)",
                (name, drop_surrogates(conversation.model), system, conversation.created, conversation.changed),
            )
            assert row.lastrowid is not None
            ids: dict[int | None, int | None] = {None: None}
            for turn in turns:
                ids[turn.id] = self._insert_turn(replace(turn, conversation=row.lastrowid, parent=ids[turn.parent]))
            self._db.execute("UPDATE conversations SET leaf = ? WHERE id = ?", (ids[conversation.leaf], row.lastrowid))
            return self._conversation(row.lastrowid)

    def _insert_turn(self, turn: Turn) -> int:
        """Insert a turn and return its new id."""
        id = self._db.execute(INSERT_TURN, to_row(turn)).lastrowid
        assert id is not None
        if turn.finished:
            index_turn(self._db, id, turn.conversation, drop_surrogates(turn.text))
        return id

    def _rewrite(
        self, turn: Turn, text: str, reasoning: str, spans: Spans, metrics: Mapping[str, Any], *, finished: bool
    ) -> Turn:
        values = (drop_surrogates(text), drop_surrogates(reasoning), to_column(spans), to_column(metrics), finished)
        with self._transaction():
            columns = "text = ?, reasoning = ?, spans = ?, metrics = ?, finished = ?"
            found = self._db.execute(f"UPDATE turns SET {columns} WHERE id = ? AND NOT finished", (*values, turn.id))
            if not found.rowcount and self._turn(turn.id):  # which raises where it has been removed
                raise CacheError(f"turn {turn.id} is finished already.", hint="Add another turn.")
            if finished:
                index_turn(self._db, turn.id, turn.conversation, values[0])
            self._db.execute("UPDATE conversations SET changed = ? WHERE id = ?", (time.time(), turn.conversation))
            return self._turn(turn.id) if finished else replace(turn, text=values[0], reasoning=values[1], spans=spans)

    def _change(self, conversation: Conversation, column: str, value: str | int | None) -> Conversation:
        with self._transaction():
            self._db.execute(f"UPDATE conversations SET {column} = ? WHERE id = ?", (value, conversation.id))
            return self._conversation(conversation.id)

    def _conversations(self, where: str, *values: Any) -> Iterator[Conversation]:
        for row in self._db.execute(f"{SELECT_CONVERSATION} {where}", values).fetchall():
            yield read_conversation(row)

    def _conversation(self, id: int | None) -> Conversation:
        for found in self._conversations(_BY_ID, id):
            return found
        raise CacheError(f"conversation {id} has been removed.", hint="Start a new conversation.")

    def _turns(self, query: str, *values: Any) -> list[Turn]:
        with self._map_errors():
            return [read_turn(row) for row in self._db.execute(query, values).fetchall()]

    def _turn(self, id: int) -> Turn:
        for found in self._turns(f"{SELECT_TURN} WHERE id = ?", id):
            return found
        raise CacheError(f"turn {id} has been removed with its conversation.", hint="Start a new conversation.")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """One transaction, rolled back if the body fails."""
        with self._map_errors():
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    @contextmanager
    def _map_errors(self) -> Iterator[None]:
        """Raise errors of the file as CacheError; errors of the caller, such as a wrong thread, pass through."""
        try:
            yield
        except sqlite3.ProgrammingError:
            raise
        except sqlite3.Error as error:
            raise to_cache_error(error, self._path) from error


# Export of a conversation: Markdown of the current branch, and JSON of all branches, which can be imported.


_VERSION = 1
_VERSION_KEY = "edgespec_conversation"
_FENCE = re.compile(r"([ \t>]*)(`{3,}|~{3,})(.*)")


def to_markdown(store: Store, conversation: Conversation) -> str:
    """The current branch. Text is copied verbatim; an unclosed code block is closed. Raises CacheError."""
    parts = [f"# {conversation.title}", f"Model: {conversation.model}"]
    if conversation.system:
        parts += ["## System", _close_fence(conversation.system)]
    for turn in store.path(conversation.leaf):
        parts.append(f"## {turn.role.capitalize()}")
        if turn.reasoning.strip():
            parts += ["<details><summary>Reasoning</summary>", _close_fence(turn.reasoning), "</details>"]
        parts.append(_close_fence(turn.text))
    return "\n\n".join(part for part in parts if part) + "\n"


def to_json(store: Store, conversation: Conversation) -> str:
    """All branches as ASCII. Raises CacheError."""
    turns = [{k: v for k, v in asdict(turn).items() if k != "conversation"} for turn in store.turns(conversation)]
    state = {k: v for k, v in asdict(conversation).items() if k != "id"}
    return json.dumps({_VERSION_KEY: _VERSION, **state, "turns": turns}, indent=1) + "\n"


@dataclass
class _Exported:
    conversation: Conversation
    turns: list[Turn]


def from_json(text: str) -> tuple[Conversation, list[Turn]]:
    """Read the output of `to_json` for `Store.insert`; the ids are valid only within it.

    Raises InvalidRequest, which names the fault.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        state = json.loads(text, parse_constant=_read_number, parse_float=_read_number, parse_int=_read_integer)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"it is not JSON: {reason_of(error)}") from error
    if not isinstance(state, dict) or state.get(_VERSION_KEY) != _VERSION:
        raise _invalid(f"'{_VERSION_KEY}' is not {_VERSION}, the supported version")
    turns = state.get("turns")
    if isinstance(turns, list):
        turns = [{**turn, "conversation": 0} if isinstance(turn, dict) else turn for turn in turns]
    try:
        read = TypeAdapter(_Exported).validate_python({"conversation": {**state, "id": 0}, "turns": turns})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _invalid(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    known: set[int | None] = {None}
    for turn in read.turns:
        if turn.id in known:
            raise _invalid(f"the id {turn.id} occurs twice")
        if turn.parent not in known:
            raise _invalid(f"the parent {turn.parent} is not an earlier turn")
        if not all(isinstance(span, list) for span in turn.spans):
            raise _invalid(f"the spans of turn {turn.id} are not lists")
        known.add(turn.id)
    if read.conversation.leaf not in known:
        raise _invalid(f"the leaf {read.conversation.leaf} is not one of its turns")
    return read.conversation, read.turns


def _read_number(text: str) -> float:
    """A number that metrics can be computed with. Raises ValueError."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is not a number")
    return value


def _read_integer(text: str) -> int:
    _read_number(text)
    return int(text)


def _invalid(fault: str) -> InvalidRequest:
    return InvalidRequest(f"this is not an exported conversation: {fault}.", hint="Choose a file of /export.")


def _close_fence(text: str) -> str:
    """`text` without trailing blank lines, and with a closing fence if one is missing."""
    fence_open: tuple[str, str] | None = None
    for line in text.splitlines():
        if fence := _FENCE.match(line):
            indent, marks, rest = fence.groups()
            if fence_open is None:
                if marks[0] == "~" or "`" not in rest:
                    fence_open = indent, marks
            elif marks.startswith(fence_open[1]) and not rest.strip():
                fence_open = None
    text = text.rstrip()
    return text if fence_open is None else f"{text}\n{''.join(fence_open)}"
