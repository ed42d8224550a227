"""What of a chat is left out of a full context, and what is said."""

from __future__ import annotations

import pytest

from edgespec.chat.context import describe_end, make_room
from edgespec.chat.state import Chat
from edgespec.core.sampling import SamplingParams
from edgespec.errors import ContextOverflow
from edgespec.text.chat_template import Message

SIZE = 200


def count(prompt: tuple[Message, ...]) -> int:
    """A token is a character."""
    n = sum(len(message.content) for message in prompt)
    if n > SIZE:
        raise ContextOverflow(f"the prompt has {n} tokens, the context holds {SIZE}.", hint="")
    return n


def chat_of(*lengths: int, rolling: bool, system: str = "") -> Chat:
    """Questions and answers of these lengths in turn."""
    chat = Chat(system, SamplingParams(), None, None, (), rolling=rolling)
    chat.messages = [Message(("user", "assistant")[i % 2], "x" * length) for i, length in enumerate(lengths)]
    return chat


def ask(chat: Chat, length: int) -> str | None:
    question = Message("user", "q" * length)
    notice = make_room(chat, [*chat.messages, question], SIZE, count)
    chat.messages.append(question)
    return notice


def test_what_fits_is_left_as_it_is() -> None:
    for rolling in (False, True):
        chat = chat_of(50, 50, rolling=rolling)
        assert ask(chat, 84) is None and chat.left_out == 0
        assert sum(len(message.content) for message in chat.request().prompt) == 184  # 16 for the answer


def test_whole_turns_are_left_out_the_oldest_first_and_the_system_message_stays() -> None:
    chat = chat_of(40, 20, 30, 20, 30, 20, rolling=True, system="Be brief.")
    assert ask(chat, 25) == "The context is full: question 1 and its answer are left out from here on."
    assert [message.content[:2] for message in chat.request().prompt] == ["Be", "xx", "xx", "xx", "xx", "qq"]
    assert chat.left_out == 2 and len(chat.messages) == 7, "the chat itself keeps everything"
    chat.messages.append(Message("assistant", "x" * 20))
    assert ask(chat, 25) is None, "a quarter of the context was freed"
    chat.messages.append(Message("assistant", "x" * 20))
    assert ask(chat, 90) == "The context is full: questions 2 to 4 and their answers are left out from here on."
    assert chat.request().prompt == (Message("system", "Be brief."), *chat.messages[8:])


def test_what_cannot_fit_names_the_choices_and_changes_nothing() -> None:
    for length in (90, 120):  # no room for an answer; not even for the prompt
        chat = chat_of(50, 50, rolling=False)
        with pytest.raises(ContextOverflow, match="the prompt has ") as refusal:
            ask(chat, length)
        assert all(choice in refusal.value.hint for choice in ("Shorten", "/set rolling on", "/new", "--ctx"))
        assert chat.left_out == 0 and len(chat.messages) == 2
    for chat in (chat_of(50, 50, rolling=True), chat_of(rolling=False), chat_of(rolling=True)):
        with pytest.raises(ContextOverflow) as refusal:
            ask(chat, 199)
        assert "Shorten" in refusal.value.hint and "rolling" not in refusal.value.hint and chat.left_out == 0


def test_the_end_is_told_with_what_to_do() -> None:
    assert "90% full (180 of 200 tokens)" in describe_end(chat_of(rolling=False), 180, SIZE)
    assert "/set rolling on" in describe_end(chat_of(rolling=False), 180, SIZE)
    assert "/set rolling on" not in describe_end(chat_of(rolling=True), 180, SIZE)
