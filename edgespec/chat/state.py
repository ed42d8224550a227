"""The state of a chat: its messages and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from edgespec.autopilot.speculation import Speculation
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import AnswerStart, MemoryUse, Request
from edgespec.engine.repetition import ENDLESS
from edgespec.errors import CacheError, InvalidRequest, reason_of
from edgespec.files import write_atomically
from edgespec.models.registry import SamplingDefaults
from edgespec.text.chat_template import Message

_NUMBERS = {
    f.name: float if isinstance(f.default, float) else int for f in fields(SamplingParams) if f.name != "logit_bias"
}
SETTINGS = (*_NUMBERS, "max_tokens", "seed", "rolling", "system")
NONE = "none"
"""The value by which a user returns a setting to its default."""


@dataclass(eq=False)
class Chat:
    """The messages, and the settings of the next answer.

    max_tokens        None: what the model's authors recommend, else to the end of the context
    rolling           leave out the oldest turns when the context is full
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
                raise InvalidRequest("max_tokens must be at least 1.")
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
