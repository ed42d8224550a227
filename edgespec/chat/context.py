"""How much of a chat the context holds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from edgespec.chat.state import Chat
from edgespec.errors import ContextOverflow
from edgespec.text.chat_template import Message

NEARLY_FULL = 0.9
_MIN_ANSWER = 16  # tokens that must be free for an answer, or an eighth of a small context
_LARGER = "open the model with a larger --ctx"
Count = Callable[[tuple[Message, ...]], int]
"""Counts the tokens of a prompt. Raises ContextOverflow for a text far longer than the context."""


def make_room(chat: Chat, messages: Sequence[Message], context_size: int, count: Count) -> str | None:
    """Choose what is left out of the request for `messages`, which the chat is about to hold.

    A rolling chat leaves out whole turns, the oldest first, until a quarter of the context is free, or `max_tokens` if
    that is less; the system message and the last question stay. Returns a sentence about what else is left out from
    here on. Raises ContextOverflow, which names the choices; then nothing changes.
    """
    free = min(_MIN_ANSWER, context_size // 8)
    problem = _find_overflow(chat, messages[chat.left_out :], context_size, free, count)
    if problem is None:
        return None
    starts = [i for i, message in enumerate(messages) if message.role == "user" and i > chat.left_out]
    if not starts:
        raise ContextOverflow(problem, hint=f"Shorten the message, or {_LARGER}.")
    if not chat.rolling:
        hint = f"Shorten the message; /set rolling on leaves out the oldest turns; /new starts again; or {_LARGER}."
        raise ContextOverflow(problem, hint=hint)

    def fits(start: int) -> bool:
        room = free if start == starts[-1] else min(chat.max_tokens or context_size, context_size // 4)
        return _find_overflow(chat, messages[start:], context_size, room, count) is None

    at = bisect_left(starts, True, key=fits)
    if at == len(starts):
        raise ContextOverflow(problem, hint=f"It does not fit even alone. Shorten the message, or {_LARGER}.")
    first = sum(message.role == "user" for message in messages[: chat.left_out]) + 1
    last = sum(message.role == "user" for message in messages[: starts[at]])
    chat.left_out = starts[at]
    which = f"questions {first} to {last} and their answers" if last > first else f"question {first} and its answer"
    return f"The context is full: {which} are left out from here on."


def can_go_on(chat: Chat, used: int, context_size: int) -> bool:
    """Whether an answer can be continued when `used` of `context_size` tokens are in use."""
    return chat.rolling or used <= context_size - min(_MIN_ANSWER, context_size // 8)


def describe_end(chat: Chat, used: int, context_size: int) -> str:
    """What to say when `used` of `context_size` tokens are in use: how full the context is, and what to do."""
    used = min(used, context_size)  # the last token of an answer takes no place
    fill = f"The context is {used / context_size:.0%} full ({used:,} of {context_size:,} tokens)."
    if chat.rolling:
        return f"{fill} The oldest turns are left out when a message does not fit."
    return f"{fill} /set rolling on leaves out the oldest turns where it is full; /new starts again; --ctx sets it."


def _find_overflow(chat: Chat, messages: Sequence[Message], size: int, free: int, count: Count) -> str | None:
    """A sentence about a request that does not leave `free` of `size` tokens; None for one that does."""
    try:
        n = count((*chat.system_messages, *messages))
    except ContextOverflow as overflow:
        return overflow.message
    if n > size:
        return f"the prompt has {n:,} tokens, the context holds {size:,}."
    if n > size - free:
        return f"the prompt has {n:,} tokens, which leaves no room for an answer in the context."
    return None
