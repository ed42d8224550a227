"""Keeps the chat, its turns and their copy in the store consistent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from edgespec.chat import Conversation, Spans, Store, Turn, to_json, to_markdown
from edgespec.chat.remembered import name_source
from edgespec.chat.state import Chat, write_file
from edgespec.engine.events import MemoryUse
from edgespec.errors import CacheError, InvalidRequest
from edgespec.text.chat_template import Message
from edgespec.units import count


@dataclass(frozen=True, slots=True)
class Fork:
    """A place with several branches.

    parent    id of the turn before; None at the start
    branches  ids of the turns there, the oldest first
    at        index of the one on the screen; -1 if the screen ends before them
    """

    parent: int | None
    branches: Sequence[int]
    at: int

    @property
    def label(self) -> str:
        return f"‹ {self.at + 1}/{len(self.branches)} ›"  # noqa: RUF001


T = TypeVar("T")
SAVE_INTERVAL_S = 0.5  # while an answer is generated


class ConversationRecorder:
    """Stores every question and answer as a turn. A repeated question or answer becomes a branch.

    saved          the user's store
    store          the store of the conversation: `saved`, or one in memory for an incognito conversation
    turns          the branch on the screen; `chat.messages` always holds its texts
    conversation   None before the first question
    model          name of the open model, which the conversation takes with its next answer

    If the store fails, `report` is called once with a message, and the chat continues in memory.
    """

    def __init__(self, chat: Chat, store: Store, report: Callable[[str], object]) -> None:
        self.saved = self.store = store
        self.turns: list[Turn] = []
        self.conversation: Conversation | None = None
        self.chat = chat
        self._report = report
        self.model = ""
        self._fork: Fork | None = None  # the one that was selected last
        self._is_saved = True
        self._saved_s = 0.0

    @property
    def questions(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.role == "user"]

    @property
    def is_incognito(self) -> bool:
        """Whether nothing of the conversation is kept."""
        return self.store is not self.saved

    @property
    def memory(self) -> MemoryUse | None:
        """How the memory keeps this conversation; None if it is not saved."""
        if self.conversation is None or self.store.is_in_memory:
            return None
        return MemoryUse(source=name_source(self.conversation.id))

    def drop_unanswered(self) -> bool:
        """Take a question without an answer, or with reasoning alone, off the screen. Returns whether there was one.

        It stays as a branch.
        """
        turns = list(self.turns)
        while turns and (turns[-1].role == "user" or not turns[-1].text):
            turns.pop()
        is_any = len(turns) < len(self.turns)
        self._set_turns(turns)
        return is_any

    def ask(self, text: str) -> None:
        """Add a question after the last answer that has a text."""
        self.drop_unanswered()

        def write() -> Turn:
            if self.conversation is None:
                self.conversation = self.store.new(self.model, self.chat.system)
            turn = self.store.add(self.conversation, self.turns[-1] if self.turns else None, "user", text)
            self.conversation = self.store.resume(self.conversation.id)  # which has the title of its first question
            return turn

        turn = self._write(write)
        self._set_turns([*self.turns, turn])

    def begin_answer(self, settings: Mapping[str, Any]) -> None:
        """Add an empty answer to the last question, as another branch if it already has one."""
        if self._require_conversation().model != self.model:
            self.conversation = self._write(lambda: self.store.set_model(self._require_conversation(), self.model))
        turn = self._write(
            lambda: self.store.add(self._require_conversation(), self.turns[-1], "assistant", "", settings=settings)
        )
        self._saved_s = monotonic()
        self._set_turns([*self.turns, turn])

    def require_cut_answer(self) -> Turn:
        """The last answer. Raises InvalidRequest if there is none, or if it is whole."""
        turn = self.turns[-1] if self.turns else None
        if turn is None or turn.role == "user":
            raise InvalidRequest("there is no answer to continue.", hint="/retry answers the last question.")
        if turn.finished and turn.metrics.get("reason") == "stop":
            raise InvalidRequest("the model has ended this answer itself.", hint="/retry answers the question again.")
        return turn

    def continue_answer(self) -> None:
        """Let the last answer grow again."""
        self.turns[-1] = self._write(lambda: self.store.reopen(self.turns[-1]))
        self._saved_s = monotonic()

    def update_answer(self, text: str, reasoning: str, spans: Callable[[], Spans]) -> None:
        """Store the answer so far, at most once in SAVE_INTERVAL_S."""
        if monotonic() - self._saved_s >= SAVE_INTERVAL_S:
            self.turns[-1] = self._write(lambda: self.store.grow(self.turns[-1], text, reasoning, spans()))
            self._saved_s = monotonic()

    def finish_answer(self, text: str, reasoning: str, spans: Spans, metrics: Mapping[str, Any]) -> None:
        """Store the complete answer. An empty one is dropped from `turns`, and the newest other answer to its question
        takes its place.
        """
        self.turns[-1] = self._write(lambda: self.store.finish(self.turns[-1], text, reasoning, spans, metrics))
        if text or reasoning:
            self._set_turns(self.turns)
            return
        self._set_turns(self.turns[:-1])
        (fork,) = self.forks()[-1:] or (None,)
        if fork is not None and fork.at < 0:
            self.switch_branch(fork, len(fork.branches) - 1)
        else:
            self._select()

    def rewind(self, number: int, *, keep_question: bool = False) -> str:
        """Go back to before question `number`, counted from 1, or to before its answer; returns the question's text.

        What followed stays as a branch.
        """
        question = self.questions[number - 1]
        self._show(self.turns[: self.turns.index(question) + keep_question])
        self._select()
        return question.text

    def forks(self) -> list[Fork]:
        """The places of this conversation's branches, from the first message on the screen to what follows the last."""
        after: Mapping[int | None, list[int]] = {}
        with suppress(CacheError):
            after = self.store.branches(self.conversation) if self.conversation is not None else {}
        shown = [turn.id for turn in self.turns]
        found: list[Fork] = []
        for parent, id in zip_longest([None, *shown], shown):
            branches = after.get(parent, [])
            if id is not None and id not in branches:
                branches = [*branches, id]  # an answer that is empty still
            if len(branches) > (id is not None):
                found.append(Fork(parent, branches, branches.index(id) if id is not None else -1))
        return found

    def select_fork(self, by: int = 0) -> Fork | None:
        """Select and return a fork: the one `by` forks below the last selection, which is the last fork at first. None
        if there are no forks.
        """
        forks = self.forks()
        if not forks:
            return None
        selected = self._fork
        at = next((i for i, fork in enumerate(forks) if selected and fork.parent == selected.parent), len(forks) - 1)
        self._fork = forks[max(0, min(at + by, len(forks) - 1))]
        return self._fork

    def describe_place(self, fork: Fork) -> str:
        """Say where a fork is: at a question or an answer, by its number."""
        before = next((i for i, turn in enumerate(self.turns, 1) if turn.id == fork.parent), 0)
        number = sum(turn.role == "user" for turn in self.turns[:before])
        is_answer = before > 0 and self.turns[before - 1].role == "user"
        return f"at the answer to question {number}" if is_answer else f"at question {number + 1}"

    def switch_branch(self, fork: Fork, to: int) -> None:
        """Show a branch of a fork, counted from 0, up to its newest turn; the fork is selected. Raises CacheError."""
        self._show(_drop_empty_answer(self.store.path(self.store.newest_leaf(fork.branches[to]))))
        self._fork = fork
        self._select()

    def resume(self, id: int) -> None:
        """Continue a saved conversation. Raises InvalidRequest, CacheError."""
        conversation = self.saved.resume(id)
        self._use_store(self.saved)
        self.show(conversation)

    def show(self, conversation: Conversation) -> None:
        """Continue a conversation of `store`. Raises CacheError."""
        self.conversation = conversation
        self.chat.system = self.conversation.system
        self._show(_drop_empty_answer(self.store.path(self.conversation.leaf)))
        if n_changed := self.store.count_changed(conversation):
            told = f"The disk or another program has changed {count(n_changed, 'message')} of this conversation."
            self._report(f"{told} `edgespec doctor` shows where the file is.")

    def start_incognito(self, *, is_on: bool) -> None:
        """Start a conversation of which nothing is kept, or one that is saved again."""
        self._use_store(Store.in_memory() if is_on else self.saved)
        self.start_new()

    def start_new(self) -> None:
        """Start a conversation, which is incognito if the one before it was."""
        self.conversation = None
        self._show([])

    def use_system(self) -> None:
        if self.conversation is not None:
            self._write(lambda: self.store.set_system(self._require_conversation(), self.chat.system))

    def rename(self, title: str) -> str:
        """Set the title, and return it as it is stored."""
        renamed = self._write(lambda: self.store.rename(self._require_conversation(), title))
        self.conversation = renamed
        return renamed.title

    def export(self, path: Path, *, overwrite: bool) -> None:
        """Write the branch on the screen as Markdown, or all branches as JSON, by the name of the file.

        Raises InvalidRequest, CacheError.
        """
        if self.conversation is None:
            raise InvalidRequest("there is no conversation to export.", hint="Ask something first.")
        serialize = {".md": to_markdown, ".json": to_json}.get(path.suffix.lower())
        if serialize is None:
            raise InvalidRequest(f"'{path.name}' has no known format.", hint="Use a name that ends in .md or .json.")
        text = serialize(self.store, self.store.resume(self.conversation.id))
        write_file(path, text, overwrite=overwrite)

    def close(self) -> None:
        self._use_store(self.saved)
        self.saved.close()

    def _use_store(self, store: Store) -> None:
        """Use a store from now on. The store of an incognito conversation is closed, and its contents are lost."""
        if self.is_incognito:
            self.store.close()
        self.store = store

    def _show(self, turns: Sequence[Turn]) -> None:
        """Go on after `turns` instead of the present ones. None of them is left out of the context at first."""
        self.chat.left_out, self._fork = 0, None
        self._set_turns(turns)

    def _set_turns(self, turns: Sequence[Turn]) -> None:
        self.turns = list(turns)
        self.chat.messages[:] = [Message(turn.role, turn.text) for turn in turns if turn.text]

    def _select(self) -> None:
        if self.conversation is not None:
            self._write(lambda: self.store.select(self._require_conversation(), self.turns[-1] if self.turns else None))

    def _require_conversation(self) -> Conversation:
        assert self.conversation is not None
        return self.conversation

    def _write(self, write: Callable[[], T]) -> T:
        try:
            return write()
        except CacheError as error:
            if self._is_saved:
                self._report(f"{error.message} The chat continues without saving. {error.hint}".rstrip())
            self._switch_to_memory()
            return write()

    def _switch_to_memory(self) -> None:
        """Leave the store that failed, and copy the branch on the screen to one in memory."""
        self._is_saved = False
        with suppress(CacheError):
            self.store.close()
        self.saved = self.store = Store.in_memory()
        if self.conversation is not None:
            leaf = self.turns[-1].id if self.turns else None
            self.conversation = self.store.insert(replace(self.conversation, leaf=leaf), self.turns)
            self.turns = self.store.path(self.conversation.leaf)


def _drop_empty_answer(path: list[Turn]) -> list[Turn]:
    is_empty = path and path[-1].role == "assistant" and not path[-1].text and not path[-1].reasoning
    return path[:-1] if is_empty else path


def open_store() -> Store:
    """Open the user's store; if that fails, one in memory whose `notice` gives the reason."""
    try:
        return Store.open(wait_s=1.0)
    except CacheError as error:
        store = Store.in_memory()
        store.notice = f"{error.message} This chat is not saved. {error.hint}".rstrip()
        return store
