"""Turns chat messages into the prompt: Jinja templates rendered under limits, and exactly one BOS."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import Any

from edgespec.errors import InvalidModelFile, InvalidRequest, PromptTooLong, reading
from edgespec.text.tokenizer import Tokenizer

SHORTEN = "Shorten it, or set a larger --ctx. In a chat, /clear starts a new one."
_MAX_CHARACTERS_PER_TOKEN = 64  # on average, over a whole text
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""The template for a model without one: a base model continues the text."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation: its role (`system`, `user`, `assistant`, `tool`) and its text.

    `extra` holds further keys that a template may read (`tool_calls`, `reasoning_content`), as JSON values.
    """

    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def as_dict(self) -> dict[str, Any]:
        """The message in the form that templates expect."""
        return {**self.extra, "role": self.role, "content": self.content}


class _Refusal(InvalidRequest):
    """The template refused the conversation through `raise_exception`."""


@dataclass(frozen=True)  # no slots: the compiled template is cached on it
class ChatTemplate:
    """A model's chat template. `bos_text` and `eos_text` are the spellings of these tokens, "" where there is none.

    `render` may be called from any thread. The first call compiles the source.
    """

    source: str
    bos_text: str
    eos_text: str

    def render(
        self,
        messages: Sequence[Message],
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`; `variables` (JSON values) are visible to the template (`enable_thinking`).

        The prompt ends where the assistant's reply begins, or with the last message if the variable
        `add_generation_prompt` is false. If the template refuses a conversation with system messages, or leaves one of
        them out, it is rendered again with those after the first message as parts of user messages, and then with all
        of them so.

        Raises InvalidRequest with the template's own message if it refuses, and TemplateError if it is malformed,
        fails, or exceeds its limits.
        """
        values = {"tools": None, "documents": None, "add_generation_prompt": True, **(variables or {})}
        refusal: _Refusal | None = None
        for each in _foldings(messages):
            try:
                text = self._render(each, values)
            except _Refusal as error:
                refusal = refusal or error
            else:
                if all(message.content.strip() in text for message in each[1:] if message.role == "system"):
                    return text
        if refusal is not None:
            raise refusal
        return text

    def _render(self, messages: Sequence[Message], values: Mapping[str, Any]) -> str:
        from edgespec.text import sandbox  # jinja2 is imported with it

        variables = {**values, "bos_token": self.bos_text, "eos_token": self.eos_text}
        return sandbox.run(self._code, [m.as_dict() for m in messages], variables, _reject)

    @cached_property
    def _code(self) -> CodeType:
        from edgespec.text import sandbox

        return sandbox.compile_source(self.source)


def _reject(message: str) -> None:
    raise _Refusal(
        f"the model's chat template refuses this conversation: {message.rstrip('.')}.",
        hint="Change the order or the roles of the messages.",
    )


def _foldings(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """`messages`, then with the later system messages folded into user messages, then with the first one too."""
    yield messages
    if any(message.role == "system" for message in messages[1:]):
        yield [*messages[:1], *_fold_system(messages[1:])]
    if messages and messages[0].role == "system" and len(messages) > 1:
        yield _fold_system(messages)


def _fold_system(messages: Sequence[Message]) -> list[Message]:
    """`messages` with each system message at the end of the user message before it, else in front of the one after it,
    else as a user message.
    """
    folded: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message.role == "system" and folded and folded[-1].role == "user":
            folded[-1] = replace(folded[-1], content=f"{folded[-1].content}\n\n{message.content}")
        elif message.role == "system":
            waiting.append(message.content)
        elif waiting and message.role == "user":
            folded.append(replace(message, content="\n\n".join([*waiting, message.content])))
            waiting = []
        else:
            folded += [Message("user", "\n\n".join(waiting)), message] if waiting else [message]
            waiting = []
    return [*folded, Message("user", "\n\n".join(waiting))] if waiting else folded


def read_template(path: Path) -> str | None:
    """The chat template in a model's folder; None if there is none.

    It is read from `chat_template.jinja`, `chat_template.json` or `tokenizer_config.json`, in this order. Of a list of
    named templates, it is the one called "default". Raises InvalidModelFile for a damaged file, CacheError for an
    unreadable one.
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
            raise _damage_error(path / name, f"is not valid JSON: {error}") from error
        if not isinstance(config, dict):
            raise _damage_error(path / name, "holds no JSON object")
        if config.get("chat_template") is not None:
            return _choose(config["chat_template"], path / name)
    return None


def _choose(entry: object, file: Path) -> str:
    if isinstance(entry, list):
        named = {e.get("name"): e.get("template") for e in entry if isinstance(e, dict)}
        entry = named.get("default")
    if not isinstance(entry, str):
        raise _damage_error(file, "has a chat_template that is neither text nor a list with a template named default")
    return entry


def _read(file: Path) -> str | None:
    with reading(file):
        try:
            return file.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UnicodeDecodeError as error:
            raise _damage_error(file, "is not UTF-8 text") from error


def _damage_error(file: Path, problem: str) -> InvalidModelFile:
    return InvalidModelFile(f"{file} {problem}.", hint="Download the model again.")


def check_length(text: str, context_size: int) -> None:
    """Raise PromptTooLong for a text too long to tokenize; some tokenizers recurse for every character."""
    if len(text) > _MAX_CHARACTERS_PER_TOKEN * context_size:
        raise PromptTooLong(
            f"the text has {len(text):,} characters, far more than a context of {context_size:,} tokens holds.",
            hint=SHORTEN,
            n_prompt=-(-len(text) // _MAX_CHARACTERS_PER_TOKEN),
            n_context=context_size,
        )


def encode_prompt(tokenizer: Tokenizer, text: str, *, parse_special: bool) -> list[int]:
    """Token ids of a prompt, with one BOS in front if the model uses it or the text begins with it.

    There is never a second BOS, even if both the template and the tokenizer add one.
    """
    tokens = tokenizer.encode(text, parse_special=parse_special)
    bos = tokenizer.bos
    if bos is None:
        return tokens
    start = 0
    while start < len(tokens) and tokens[start] == bos:
        start += 1
    return [bos, *tokens[start:]] if start or tokenizer.add_bos else tokens
