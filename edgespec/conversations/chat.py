"""The state of a chat: messages, settings, and their form in a file."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from edgespec.core.sampling import SamplingParams
from edgespec.engine.drafting import Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Request
from edgespec.errors import CacheError, InvalidRequest
from edgespec.files import write_atomically
from edgespec.text.chat_template import Message

_NUMBERS = {
    f.name: float if isinstance(f.default, float) else int for f in fields(SamplingParams) if f.name != "logit_bias"
}
SETTINGS = (*_NUMBERS, "max_tokens", "seed", "system")


class Chat:
    """Messages so far, and how the next answer is sampled."""

    def __init__(
        self, system: str | None, sampling: SamplingParams, max_tokens: int, seed: int | None, stop: tuple[str, ...]
    ) -> None:
        self.system = system
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.seed = seed
        self._stop = stop
        self.messages: list[Message] = []

    @property
    def system_messages(self) -> tuple[Message, ...]:
        """The system message, where there is one."""
        return (Message("system", self.system),) if self.system else ()

    def request(self) -> Request:
        prompt = (*self.system_messages, *self.messages)
        return Request(prompt, self.sampling, self.max_tokens, self.seed, self._stop)

    def undo(self) -> str | None:
        """Drop the last question and its answer; returns the question, or None where there is none."""
        while self.messages:
            message = self.messages.pop()
            if message.role == "user":
                return message.content
        return None

    def setting(self, name: str) -> Any:
        """The present value of one of SETTINGS."""
        return getattr(self if hasattr(self, name) else self.sampling, name)

    def set(self, name: str, text: str) -> None:
        """Change one of SETTINGS. Raises InvalidRequest."""
        if name == "system":
            self.system = text or None
            return
        if name not in SETTINGS:
            raise InvalidRequest(f"there is no setting '{name}'.", hint=f"Set one of {', '.join(SETTINGS)}.")
        number = _NUMBERS.get(name, int)
        try:
            value = number(text)
        except ValueError:
            raise InvalidRequest(f"{name} is a number, not '{text}'.", hint=f"For example: /set {name} 1") from None
        if name == "seed":
            self.seed = int(value)
        elif name == "max_tokens":
            if value < 1:
                raise InvalidRequest("max_tokens must be at least 1.", hint="Give a larger number.")
            self.max_tokens = int(value)
        else:
            change: dict[str, Any] = {name: value}
            self.sampling = replace(self.sampling, **change)

    def save(self, path: Path) -> None:
        """Write everything as JSON. Raises CacheError."""
        state = {
            "edgespec_chat": 1,
            "system": self.system,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "sampling": asdict(self.sampling),
            "messages": [{"role": m.role, "content": m.content} for m in self.messages],
        }
        write_file(path, json.dumps(state, indent=1) + "\n")  # ASCII: whatever was typed can be written

    def load(self, path: Path) -> None:
        """Read what `save` wrote; on failure nothing changes. Raises InvalidRequest."""
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            messages = [Message(_checked(m["role"], str), _checked(m["content"], str)) for m in state["messages"]]
            given: dict[str, Any] = {k: v for k, v in state["sampling"].items() if k in _NUMBERS}
            numbers: dict[str, Any] = {k: _NUMBERS[k](_checked(v, int, float)) for k, v in given.items()}
            if numbers != given:
                raise ValueError("a fraction where a whole number belongs")
            bias = tuple((int(t), float(b)) for t, b in state["sampling"].get("logit_bias", ()))
            params = SamplingParams(**numbers, logit_bias=bias)
            max_tokens = _checked(state["max_tokens"], int)
            seed, system = _checked(state["seed"], int, type(None)), _checked(state["system"], str, type(None))
        except OSError as error:
            raise InvalidRequest(f"cannot read {path}: {_why(error)}.", hint="Check the path.") from error
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise InvalidRequest(f"{path} is not a saved chat.", hint="Load a file that /save wrote.") from error
        self.messages, self.sampling = messages, params
        self.max_tokens, self.seed, self.system = max_tokens, seed, system


def change_speculation(engine: Engine, argument: str) -> None:
    """Do what 'on', 'off', 'auto' or a number asks for: 'on' and 'off' at once, the others from the next answer on.

    Raises InvalidRequest.
    """
    present = engine.speculation
    if argument not in ("on", "off", "auto") and not (
        argument.isdecimal() and argument.isascii() and len(argument) < 4
    ):
        raise InvalidRequest(f"/spec takes on, off, auto or a number, not '{argument}'.", hint="For example: /spec 4")
    if argument != "off" and present.kind == "none":
        raise InvalidRequest("there is nothing to draft with.", hint="Choose a drafter: /draft ngram, /draft auto.")
    if argument == "auto" or (argument == "on" and present.is_plain):
        engine.speculation = replace(present, gamma=None, nodes=None)
    elif argument not in ("on", "off"):
        engine.speculation = Speculation(present.kind, int(argument), None, present.rule)
    engine.is_paused = argument == "off"


def describe_speculation(speculation: Speculation, draft: str, *, is_paused: bool) -> str:
    """How an engine drafts, in words; `draft` is what the user calls the drafter."""
    if is_paused or speculation.is_plain:
        return "speculation: off"
    amount = "as much as pays" if speculation.gamma is None else f"{speculation.gamma} tokens at a time"
    return f"speculation: {amount}, by {draft}"


def write_file(path: Path, text: str) -> None:
    """Write a file that the user has named, whole or not at all. Raises CacheError."""
    try:
        write_atomically(path, text)
    except (OSError, ValueError) as error:
        raise CacheError(f"cannot write {path}: {_why(error)}.", hint="Choose another place.") from error


def parse_path(argument: str) -> Path:
    """A path that a user has typed. Raises InvalidRequest."""
    if not argument:
        raise InvalidRequest("which file?", hint="For example: /save chat.json")
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:
        raise InvalidRequest(f"{argument}: {error}", hint="Write the path out.") from error


def _checked(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise TypeError(value)
    return value


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
