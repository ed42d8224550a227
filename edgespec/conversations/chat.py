"""The state of a chat: messages, settings, and how much of them the context holds."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from edgespec.conversations.database import Conversation, Turn
from edgespec.core.sampling import SamplingParams
from edgespec.engine.drafting import Speculation
from edgespec.engine.events import AnswerStart, MemoryUse, Request
from edgespec.engine.repetition import ENDLESS
from edgespec.errors import CacheError, ContextOverflow, InvalidRequest, reason_of
from edgespec.files import write_atomically
from edgespec.hub.cache import LocalPath, parse_reference
from edgespec.planner.plan import LoadConfig
from edgespec.registry.schema import SamplingDefaults
from edgespec.text.chat_template import Message

_NUMBERS = {
    f.name: float if isinstance(f.default, float) else int for f in fields(SamplingParams) if f.name != "logit_bias"
}
SETTINGS = (*_NUMBERS, "max_tokens", "seed", "rolling", "system")
NONE = "none"
"""What returns to the default of a setting."""


@dataclass(eq=False)
class Chat:
    """The messages, and the settings of the next answer.

    max_tokens        None: what the model's authors recommend, else to the end of the context
    rolling           leave out the oldest turns where the context is full
    default_sampling  what NONE returns to
    left_out          messages at the beginning that are left out of requests
    """

    system: str | None
    sampling: SamplingParams
    max_tokens: int | None
    seed: int | None
    stop: tuple[str, ...]
    rolling: bool = field(default=False, kw_only=True)
    default_sampling: SamplingParams = field(default=SamplingParams(), init=False)
    messages: list[Message] = field(default_factory=list, init=False)
    left_out: int = field(default=0, init=False)

    @property
    def system_messages(self) -> tuple[Message, ...]:
        return (Message("system", self.system),) if self.system else ()

    def request(
        self,
        recommended: SamplingDefaults | None = None,
        start: AnswerStart | None = None,
        memory: MemoryUse | None = None,
    ) -> Request:
        """The request for an answer to the last question, or for what follows `start`, the answer so far."""
        messages = self.messages[self.left_out :]
        if start is not None and messages[-1].role == "assistant":
            messages.pop()
        prompt = (*self.system_messages, *messages)
        max_tokens = self.max_tokens or (recommended.max_tokens if recommended else None)
        return Request(
            prompt,
            self.sampling,
            max_tokens,
            self.seed,
            self.stop,
            start=start,
            memory=memory,
            repetition=ENDLESS,
        )

    def setting(self, name: str) -> Any:
        """The value of one of SETTINGS. Raises InvalidRequest for another name."""
        if name not in SETTINGS:
            raise InvalidRequest(f"there is no setting '{name}'.", hint=f"Set one of {', '.join(SETTINGS)}.")
        return getattr(self if hasattr(self, name) else self.sampling, name)

    def set(self, name: str, text: str) -> None:
        """Change one of SETTINGS. Raises InvalidRequest."""
        self.setting(name)
        value: Any = text
        if text == NONE and name != "rolling":
            value = getattr(self.default_sampling, name, None)
        elif name == "rolling":
            if text not in ("on", "off", NONE):
                raise InvalidRequest(f"rolling is on or off, not '{text}'.", hint="For example: /set rolling on")
            value = text == "on"
        elif name != "system":
            kind = _NUMBERS.get(name, int)
            try:
                value = kind(text)
            except ValueError:
                noun, hint = "number" if kind is float else "whole number", f"Example: /set {name} 1"
                raise InvalidRequest(f"{name} must be a {noun}, not '{text}'.", hint=hint) from None
            if name == "max_tokens" and value < 1:
                raise InvalidRequest("max_tokens must be at least 1.", hint="Give a larger number.")
        if hasattr(self, name):
            setattr(self, name, value)
        else:
            self.sampling = replace(self.sampling, **{name: value})

    def changed_settings(self) -> dict[str, Any]:
        """The SETTINGS that are not the defaults."""
        defaults = {"rolling": False, **asdict(self.default_sampling)}
        values = {name: self.setting(name) for name in SETTINGS}
        return {name: value for name, value in values.items() if value != defaults.get(name)}

    def use_settings(self, settings: Mapping[str, Any]) -> None:
        """Change SETTINGS to these, and the others to the defaults. Raises InvalidRequest; then nothing changes."""
        before = dict(vars(self))
        try:
            for name in SETTINGS:
                self.set(name, NONE)
            for name, value in settings.items():
                self.set(name, value if isinstance(value, str) else _format_setting(value))
        except InvalidRequest:
            vars(self).update(before)
            raise


def describe_speculation(speculation: Speculation, draft: str, *, is_paused: bool) -> str:
    """One line about how an engine drafts; `draft` is the drafter's name for the user."""
    if is_paused or speculation.is_plain:
        return "speculation: off"
    amount = "as much as pays" if speculation.draft_max is None else f"{speculation.draft_max} tokens at a time"
    return f"speculation: {amount}, by {draft}"


def write_file(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a file atomically. Raises InvalidRequest for a file that exists unless `overwrite`, CacheError."""
    try:
        if not overwrite and path.is_file():
            raise InvalidRequest(f"'{path}' exists.", hint="Add ! to the command to replace it, such as /export! FILE.")
        write_atomically(path, text)
    except (OSError, ValueError) as error:
        raise CacheError(f"cannot write {path}: {reason_of(error)}.", hint="Choose another folder.") from error


def parse_path(argument: str) -> Path:
    """The path in a user's input. Raises InvalidRequest."""
    if not argument:
        raise InvalidRequest("a file name is missing.", hint="For example: /export chat.md")
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:
        raise InvalidRequest(f"{argument}: {error}", hint="Write the full path.") from error


# How much of a chat the context holds: what is left out of the next request, and what to say before it is full.


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
    """Whether an answer can be continued where `used` of `context_size` tokens are in use."""
    return chat.rolling or used <= context_size - min(_MIN_ANSWER, context_size // 8)


def describe_end(chat: Chat, used: int, context_size: int) -> str:
    """What to say where `used` of `context_size` tokens are in use: how full the context is, and what to do."""
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


# The model that a conversation was held with, as it is stored with each answer, so that it can be opened again.


_KEY = "opened"  # in the settings of an answer


@dataclass(frozen=True, slots=True)
class OwnModel:
    """What was asked for when the model was opened.

    reference  None: the registry's default
    draft      as `--draft` takes it
    backend    None: the best for the machine
    """

    reference: str | None
    draft: str = "auto"
    backend: str | None = None

    def to_settings(self) -> dict[str, Any]:
        """The part of an answer's settings that `find` reads."""
        return {_KEY: asdict(self)}

    @classmethod
    def of(cls, request: LoadConfig) -> Self:
        """What opens the model of `request` again, from any folder."""
        reference = request.model
        if reference is not None and request.backend != "toy":
            parsed = parse_reference(reference)
            reference = str(parsed.path.resolve()) if isinstance(parsed, LocalPath) else reference
        return cls(reference, request.draft, request.backend)

    @classmethod
    def find(cls, conversation: Conversation, turns: Sequence[Turn]) -> Self:
        """The model of the last answer among `turns`; by its name in a conversation that says no more."""
        for turn in reversed(turns):
            match turn.settings.get(_KEY) if isinstance(turn.settings, Mapping) else None:
                case {"reference": str() | None as reference, "draft": str(draft), "backend": str() | None as backend}:
                    return cls(reference, draft, backend)
        return cls(conversation.model)


def apply_setting(chat: Chat, argument: str) -> list[tuple[str, str]]:
    """Run /set: change the setting in `NAME VALUE`, if there is a value; returns names and values to show.

    Raises InvalidRequest.
    """
    name, _, value = argument.partition(" ")
    name = name.replace("-", "_")
    if value.strip():
        chat.set(name, value.strip())
    values = ((setting, chat.setting(setting)) for setting in ([name] if name else SETTINGS))
    return [(setting, _format_setting(value)) for setting, value in values]


def _format_setting(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return NONE if value is None else str(value)


# Messages to a model that only completes code.


_PYTHON_LINE = re.compile(
    r"\s*(?:(?:def|class)\s+\w+.*:?|@\w[\w.]*.*|import\s+[\w., ]+|from\s+[\w.]+\s+import\s.+|return\b.*"
    r"|(?:if|elif|for|while|with|try|except|else|finally)\b.*:|self\.\w+.*|\w+ = .+|>>> .+)"
)


def is_python(text: str) -> bool:
    """Whether a text, as a model that completes texts writes it, looks like Python: half of its lines do."""
    lines = [line for line in text.splitlines() if line.strip()]
    return 2 * sum(_PYTHON_LINE.fullmatch(line) is not None for line in lines) >= len(lines) > 0


def may_be_code(text: str) -> bool:
    """Whether a message may be the beginning of code: it looks like Python, or has characters that prose seldom has."""
    return is_python(text) or any(each in "()[]{}<>=#@_" for each in text)
