"""The conversation on the screen, turn by turn, and its copy in the store."""

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
SAVED_EVERY_S = 0.5  # of an answer that is being generated


class ConversationRecorder:
    """Follows a chat: every question and answer is a turn, and what is done again becomes a branch beside it.

    `turns` is the branch on the screen, `chat.messages` always its texts. Where the store cannot be written, `tell`
    says so once and the chat goes on in memory.
    """

    def __init__(self, chat: Chat, store: Store, tell: Callable[[str], object]) -> None:
        self.store = store
        self.turns: list[Turn] = []
        self.conversation: Conversation | None = None
        self._chat = chat
        self._tell = tell
        self._model = ""
        self._is_saved = True
        self._saved_s = 0.0

    @property
    def questions(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.role == "user"]

    def use_model(self, name: str) -> None:
        self._model = name
        if self.conversation is not None:
            self._written(lambda: self.store.set_model(self._present(), name))

    def ask(self, text: str) -> None:
        """A question behind the last answer; one that was never answered is left on a branch of its own."""
        while self.turns and self.turns[-1].role == "user":
            self.turns.pop()

        def write() -> Turn:
            if self.conversation is None:
                self.conversation = self.store.new(self._model, self._chat.system)
            return self.store.add(self.conversation, self.turns[-1] if self.turns else None, "user", text)

        turn = self._written(write)
        self._follow([*self.turns, turn])

    def begin_answer(self, settings: Mapping[str, Any]) -> None:
        """An answer to the last question, beside those that it has."""
        turn = self._written(
            lambda: self.store.add(self._present(), self.turns[-1], "assistant", "", settings=settings)
        )
        self._saved_s = monotonic()
        self._follow([*self.turns, turn])

    def grow(self, text: str, reasoning: str, spans: Callable[[], Spans]) -> None:
        """What the answer has become, written now and then."""
        if monotonic() - self._saved_s >= SAVED_EVERY_S:
            self.turns[-1] = self._written(lambda: self.store.grow(self.turns[-1], text, reasoning, spans()))
            self._saved_s = monotonic()

    def finish(self, text: str, reasoning: str, spans: Spans, metrics: Mapping[str, Any]) -> None:
        """The answer as it stays. One without a text is passed over from now on."""
        self.turns[-1] = self._written(lambda: self.store.finish(self.turns[-1], text, reasoning, spans, metrics))
        self._follow(self.turns if text else self.turns[:-1])
        if not text:
            self._select()

    def rewind(self, number: int) -> str:
        """Go back to before the question of that number, from 1; returns its text. What followed stays a branch."""
        question = self.questions[number - 1]
        self._follow(self.turns[: self.turns.index(question)])
        self._select()
        return question.text

    def rewind_answers(self, number: int) -> None:
        """Go back to the question of that number, from 1, as if it had not been answered."""
        question = self.questions[number - 1]
        self._follow(self.turns[: self.turns.index(question) + 1])
        self._select()

    def branches(self) -> tuple[list[Turn], int]:
        """Where the path last parts: the turns there, and which of them is on the screen; none where it never does."""
        for turn in reversed(self.turns):
            beside = self._beside(turn)
            if len(beside) > 1:
                return beside, [each.id for each in beside].index(turn.id)
        return [], 0

    def switch(self, to: Turn) -> None:
        """Show the branch that begins with `to`, up to where it was last gone on with. Raises CacheError."""
        self._follow(_come(self.store.path(self.store.newest_leaf(to))))
        self._select()

    def resume(self, id: int) -> None:
        """Go on with a stored conversation. Raises InvalidRequest, CacheError."""
        self.conversation = self.store.resume(id)
        self._chat.system = self.conversation.system
        self._follow(_come(self.store.path(self.conversation.leaf)))

    def begin_anew(self) -> None:
        self.conversation = None
        self._follow([])

    def take_over(self) -> None:
        """Store the messages that the chat has got from elsewhere, as a new conversation."""
        messages = list(self._chat.messages)
        self.begin_anew()
        for message in messages:
            if message.role == "user":
                self.ask(message.content)
            elif self.turns:
                self.begin_answer({})
                self.finish(message.content, "", (), {})

    def use_system(self) -> None:
        if self.conversation is not None:
            self._written(lambda: self.store.set_system(self._present(), self._chat.system))

    def rename(self, title: str) -> str:
        """Returns the title as it is kept."""
        renamed = self._written(lambda: self.store.rename(self._present(), title))
        self.conversation = renamed
        return renamed.title

    def close(self) -> None:
        self.store.close()

    def _follow(self, turns: list[Turn]) -> None:
        self.turns = list(turns)
        self._chat.messages[:] = [Message(turn.role, turn.text) for turn in turns if turn.text]

    def _select(self) -> None:
        if self.conversation is not None:
            self._written(lambda: self.store.select(self._present(), self.turns[-1] if self.turns else None))

    def _present(self) -> Conversation:
        assert self.conversation is not None
        return self.conversation

    def _beside(self, turn: Turn) -> list[Turn]:
        """The branches of which `turn` is one, without answers that never came."""
        with suppress(CacheError):
            return [each for each in self.store.siblings(turn) if each.text or each.role == "user"]
        return []

    def _written(self, write: Callable[[], T]) -> T:
        try:
            return write()
        except CacheError as error:
            if self._is_saved:
                self._tell(f"{error.message} The chat goes on without being saved. {error.hint}")
            self._go_on_in_memory()
            return write()

    def _go_on_in_memory(self) -> None:
        """A store that fails is left with what it has; the branch on the screen goes to one that cannot fail."""
        self._is_saved = False
        with suppress(CacheError):
            self.store.close()
        self.store = Store.in_memory()
        if self.conversation is not None:
            leaf = self.turns[-1].id if self.turns else None
            self.conversation = self.store.insert(replace(self.conversation, leaf=leaf), self.turns)
            self.turns = self.store.path(self.conversation.leaf)


def _come(path: list[Turn]) -> list[Turn]:
    """`path` without an answer at its end that never came."""
    return path[:-1] if path and path[-1].role == "assistant" and not path[-1].text else path


def opened_store() -> Store:
    """The user's store; where it cannot be opened, one in memory whose `notice` says why."""
    try:
        return Store.open(wait_s=1.0)
    except CacheError as error:
        store = Store.in_memory()
        store.notice = f"{error.message} This chat is not saved. {error.hint}"
        return store
