"""Keeps the chat, its turns and their copy in the store consistent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Any, TypeVar

from edgespec.conversations import Conversation, Spans, Store, Turn
from edgespec.conversations.chat import Chat
from edgespec.errors import CacheError
from edgespec.text.chat_template import Message

T = TypeVar("T")
SAVE_INTERVAL_S = 0.5  # while an answer is generated


class ConversationRecorder:
    """Stores every question and answer as a turn. A repeated question or answer becomes a branch.

    turns          the branch on the screen; `chat.messages` always holds its texts
    conversation   None before the first question

    If the store fails, `report` is called once with a message, and the chat continues in memory.
    """

    def __init__(self, chat: Chat, store: Store, report: Callable[[str], object]) -> None:
        self.store = store
        self.turns: list[Turn] = []
        self.conversation: Conversation | None = None
        self._chat = chat
        self._report = report
        self._model = ""
        self._is_saved = True
        self._saved_s = 0.0

    @property
    def questions(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.role == "user"]

    def use_model(self, name: str) -> None:
        self._model = name
        if self.conversation is not None:
            self._write(lambda: self.store.set_model(self._require_conversation(), name))

    def ask(self, text: str) -> None:
        """Add a question after the last answer. An unanswered question at the end stays on a branch of its own."""
        while self.turns and self.turns[-1].role == "user":
            self.turns.pop()

        def write() -> Turn:
            if self.conversation is None:
                self.conversation = self.store.new(self._model, self._chat.system)
            return self.store.add(self.conversation, self.turns[-1] if self.turns else None, "user", text)

        turn = self._write(write)
        self._set_turns([*self.turns, turn])

    def begin_answer(self, settings: Mapping[str, Any]) -> None:
        """Add an empty answer to the last question, as another branch where it already has one."""
        turn = self._write(
            lambda: self.store.add(self._require_conversation(), self.turns[-1], "assistant", "", settings=settings)
        )
        self._saved_s = monotonic()
        self._set_turns([*self.turns, turn])

    def update_answer(self, text: str, reasoning: str, spans: Callable[[], Spans]) -> None:
        """Store the answer so far, at most once in SAVE_INTERVAL_S."""
        if monotonic() - self._saved_s >= SAVE_INTERVAL_S:
            self.turns[-1] = self._write(lambda: self.store.grow(self.turns[-1], text, reasoning, spans()))
            self._saved_s = monotonic()

    def finish_answer(self, text: str, reasoning: str, spans: Spans, metrics: Mapping[str, Any]) -> None:
        """Store the complete answer; one without text is dropped from `turns`."""
        self.turns[-1] = self._write(lambda: self.store.finish(self.turns[-1], text, reasoning, spans, metrics))
        self._set_turns(self.turns if text else self.turns[:-1])
        if not text:
            self._select()

    def rewind(self, number: int) -> str:
        """Go back to before question `number`, counted from 1; returns its text. What followed stays as a branch."""
        question = self.questions[number - 1]
        self._set_turns(self.turns[: self.turns.index(question)])
        self._select()
        return question.text

    def rewind_answers(self, number: int) -> None:
        """Go back to question `number`, counted from 1, before its answer. The answer stays as a branch."""
        question = self.questions[number - 1]
        self._set_turns(self.turns[: self.turns.index(question) + 1])
        self._select()

    def branches(self) -> tuple[list[Turn], int]:
        """The turns at the last fork, and the index of the one on the screen; no turns where there is no fork."""
        for turn in reversed(self.turns):
            siblings = self._list_siblings(turn)
            if len(siblings) > 1:
                return siblings, [each.id for each in siblings].index(turn.id)
        return [], 0

    def switch_branch(self, to: Turn) -> None:
        """Show the branch that starts with `to`, up to its newest turn. Raises CacheError."""
        self._set_turns(_drop_empty_answer(self.store.path(self.store.newest_leaf(to))))
        self._select()

    def resume(self, id: int) -> None:
        """Continue a stored conversation. Raises InvalidRequest, CacheError."""
        self.conversation = self.store.resume(id)
        self._chat.system = self.conversation.system
        self._set_turns(_drop_empty_answer(self.store.path(self.conversation.leaf)))

    def start_new(self) -> None:
        self.conversation = None
        self._set_turns([])

    def import_messages(self) -> None:
        """Store the messages of the chat, which were loaded from a file, as a new conversation."""
        messages = list(self._chat.messages)
        self.start_new()
        for message in messages:
            if message.role == "user":
                self.ask(message.content)
            elif self.turns:
                self.begin_answer({})
                self.finish_answer(message.content, "", (), {})

    def use_system(self) -> None:
        if self.conversation is not None:
            self._write(lambda: self.store.set_system(self._require_conversation(), self._chat.system))

    def rename(self, title: str) -> str:
        """Returns the title as stored."""
        renamed = self._write(lambda: self.store.rename(self._require_conversation(), title))
        self.conversation = renamed
        return renamed.title

    def close(self) -> None:
        self.store.close()

    def _set_turns(self, turns: list[Turn]) -> None:
        self.turns = list(turns)
        self._chat.messages[:] = [Message(turn.role, turn.text) for turn in turns if turn.text]

    def _select(self) -> None:
        if self.conversation is not None:
            self._write(lambda: self.store.select(self._require_conversation(), self.turns[-1] if self.turns else None))

    def _require_conversation(self) -> Conversation:
        assert self.conversation is not None
        return self.conversation

    def _list_siblings(self, turn: Turn) -> list[Turn]:
        """`turn` and its siblings, without empty answers; none where the store fails."""
        with suppress(CacheError):
            return [each for each in self.store.siblings(turn) if each.text or each.role == "user"]
        return []

    def _write(self, write: Callable[[], T]) -> T:
        try:
            return write()
        except CacheError as error:
            if self._is_saved:
                self._report(f"{error.message} The chat continues without saving. {error.hint}")
            self._switch_to_memory()
            return write()

    def _switch_to_memory(self) -> None:
        """Leave the store that failed, and copy the branch on the screen to one in memory."""
        self._is_saved = False
        with suppress(CacheError):
            self.store.close()
        self.store = Store.in_memory()
        if self.conversation is not None:
            leaf = self.turns[-1].id if self.turns else None
            self.conversation = self.store.insert(replace(self.conversation, leaf=leaf), self.turns)
            self.turns = self.store.path(self.conversation.leaf)


def _drop_empty_answer(path: list[Turn]) -> list[Turn]:
    """`path` without an empty answer at its end."""
    return path[:-1] if path and path[-1].role == "assistant" and not path[-1].text else path


def open_store() -> Store:
    """Open the user's store; where that fails, one in memory whose `notice` gives the reason."""
    try:
        return Store.open(wait_s=1.0)
    except CacheError as error:
        store = Store.in_memory()
        store.notice = f"{error.message} This chat is not saved. {error.hint}"
        return store
