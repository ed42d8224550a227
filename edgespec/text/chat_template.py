"""Chat messages to the prompt a model was trained on: Jinja templates rendered under limits, and one BOS."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import Any

from edgespec.errors import CacheError, ContextOverflow, InvalidModelFile, InvalidRequest, TemplateError
from edgespec.text.limits import Limits
from edgespec.text.tokenizer import Tokenizer

SHORTEN = "Shorten it, or set a larger --ctx; in a chat, /clear starts anew."
_MOST_CHARACTERS_A_TOKEN = 64  # on average, over a whole text
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""The template of a model that has none: a base model continues the text it is given."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation: who speaks (`system`, `user`, `assistant`, `tool`) and the text.

    `extra` holds the further keys a template may read (`tool_calls`, `reasoning_content`), as JSON values.
    """

    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def as_dict(self) -> dict[str, Any]:
        """The message as templates expect it."""
        return {**self.extra, "role": self.role, "content": self.content}


class _Rejected(InvalidRequest):
    """The template itself refused the conversation, through `raise_exception`."""


@dataclass(frozen=True)  # no slots: the compiled template is cached on it
class ChatTemplate:
    """A model's chat template. `bos_text` and `eos_text` are how its tokens are spelled, "" where it has none.

    Rendering works in any thread. The source is compiled once, at the first render.
    """

    source: str
    bos_text: str
    eos_text: str
    limits: Limits = field(default_factory=Limits)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`; `variables` (JSON values) are visible to the template (`enable_thinking`).

        With `add_generation_prompt` the prompt ends where the assistant's reply begins. If the template refuses
        the conversation and it starts with a system message, that message is put in front of the first user
        message and the template is asked once more.

        Raises InvalidRequest with the template's own words if it refuses, and TemplateError if it is malformed,
        fails, or exceeds its limits.
        """
        values = {"tools": None, "documents": None, **(variables or {}), "add_generation_prompt": add_generation_prompt}
        try:
            return self._render(messages, values)
        except _Rejected as refusal:
            folded = _fold_system(messages)
            if folded is None:
                raise
            try:
                return self._render(folded, values)
            except _Rejected:
                raise refusal from None

    def _render(self, messages: Sequence[Message], values: Mapping[str, Any]) -> str:
        from edgespec.text import sandbox  # jinja2 is imported with it

        given = {**values, "bos_token": self.bos_text, "eos_token": self.eos_text}
        return sandbox.run(self._code, [m.as_dict() for m in messages], given, self.limits, _reject)

    @cached_property
    def _code(self) -> CodeType:
        from edgespec.text import sandbox

        if len(self.source) > self.limits.source_chars:
            raise TemplateError(
                f"the chat template is {len(self.source):,} characters long; {self.limits.source_chars:,} are allowed",
                hint="use another file of this model, or pass a shorter template",
            )
        return sandbox.compile_source(self.source)


def _reject(message: str) -> None:
    raise _Rejected(
        f"the model's chat template refuses this conversation: {message}",
        hint="change the order or the roles of the messages",
    )


def _fold_system(messages: Sequence[Message]) -> list[Message] | None:
    """`messages` with the leading system text in front of the first user turn; None where that is not possible."""
    if len(messages) < 2 or messages[0].role != "system" or messages[1].role != "user":
        return None
    system, user, *rest = messages
    return [replace(user, content=f"{system.content}\n\n{user.content}"), *rest]


def template_from_folder(path: Path) -> str | None:
    """The chat template beside a model's files, None if there is none.

    Looks at `chat_template.jinja`, `chat_template.json`, then `tokenizer_config.json`. Of a list of named templates
    the one called "default" counts. Raises InvalidModelFile for a damaged file, CacheError for an unreadable one.
    """
    template = _read(path / "chat_template.jinja")
    if template is not None:
        return template
    for name in ("chat_template.json", "tokenizer_config.json"):
        text = _read(path / name)
        if text is None:
            continue
        try:
            config = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _damaged(path / name, f"is not valid JSON: {error}") from error
        if not isinstance(config, dict):
            raise _damaged(path / name, "holds no JSON object")
        if config.get("chat_template") is not None:
            return _choose(config["chat_template"], path / name)
    return None


def _choose(entry: object, file: Path) -> str:
    if isinstance(entry, list):
        named = {e.get("name"): e.get("template") for e in entry if isinstance(e, dict)}
        entry = named.get("default")
    if not isinstance(entry, str):
        raise _damaged(file, "has a chat_template that is neither text nor a list with a template named default")
    return entry


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError as error:
        raise _damaged(file, "is not UTF-8 text") from error
    except OSError as error:
        raise CacheError(f"{file} cannot be read: {error.strerror}", hint="check the file's permissions") from error


def _damaged(file: Path, what: str) -> InvalidModelFile:
    return InvalidModelFile(f"{file} {what}", hint="download the model again")


def require_short(text: str, context_size: int) -> None:
    """Raises ContextOverflow for a text that is not worth tokenizing: some tokenizers recurse for every character."""
    if len(text) > _MOST_CHARACTERS_A_TOKEN * context_size:
        raise ContextOverflow(
            f"the text has {len(text):,} characters, far more than a context of {context_size:,} tokens holds.",
            hint=SHORTEN,
        )


def encode_prompt(tokenizer: Tokenizer, text: str, *, parse_special: bool) -> list[int]:
    """Token ids of a prompt, with one BOS in front if the model wants it or the text itself begins with it.

    Never two, however often a template and the tokenizer both add it.
    """
    tokens = tokenizer.encode(text, parse_special=parse_special)
    bos = tokenizer.bos
    if bos is None:
        return tokens
    start = 0
    while start < len(tokens) and tokens[start] == bos:
        start += 1
    return [bos, *tokens[start:]] if start or tokenizer.add_bos else tokens
