"""Turns chat messages into the prompt: Jinja templates rendered under limits, and exactly one BOS."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from pathlib import Path
from typing import Any

from edgespec.errors import InvalidModelFile, InvalidRequest, PromptTooLong, TemplateError, reading, reason_of
from edgespec.isolated import ChildDied, Helper
from edgespec.text.tokenizer import Tokenizer

SHORTEN = "Shorten it, or set a larger --ctx."
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
        return {**self.extra, "role": self.role, "content": self.content}


_VARIABLES = {
    "tools": None,
    "documents": None,
    "add_generation_prompt": True,
    # Where the reasoning of earlier answers is kept, what was generated remains a prefix of the prompt.
    "preserve_thinking": True,
    "clear_thinking": False,
}
RENDERER = Helper("edgespec.text.sandbox", None, deadline_s=2.0, max_bytes=2**29)
"""Renders the templates of this process. It takes 0.1 seconds to start."""
atexit.register(RENDERER.close)
os.register_at_fork(after_in_child=RENDERER.forget)


class _Refusal(InvalidRequest):
    """The template refused the conversation through `raise_exception`."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A model's chat template. `bos_text` and `eos_text` are the spellings of these tokens, "" where there is none.

    `render` may be called from any thread. Templates come from anywhere, so a process of its own runs them.
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
        `add_generation_prompt` is false. It has the reasoning of earlier answers where the template has a switch for
        that, `preserve_thinking` or `clear_thinking`, unless a variable says otherwise. If the template refuses a
        conversation with system messages, or leaves one of them out, it is rendered again with those after the first
        message as parts of user messages, and then with all of them so.

        Raises InvalidRequest with the template's own message if it refuses, and TemplateError if it is malformed,
        fails, or exceeds its limits.
        """
        values = {**_VARIABLES, **(variables or {})}
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
        variables = {**values, "bos_token": self.bos_text, "eos_token": self.eos_text}
        try:
            kind, text = RENDERER.ask((self.source, {**variables, "messages": [m.as_dict() for m in messages]}))
        except ChildDied as error:
            kind, text = "fault", str(error)
        if kind == "refusal":
            raise _Refusal(
                f"the model's chat template refuses this conversation: {text.rstrip('.')}.",
                hint="Change the order or the roles of the messages.",
            )
        if kind == "fault":
            hint = "Use another file of this model or another template."
            raise TemplateError(f"the chat template {text}.", hint=hint)
        return str(text)


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
    is_open = False  # whether the last one is of system messages alone
    for message in messages:
        is_system, last = message.role == "system", folded[-1] if folded else None
        if last is not None and last.role == "user" and (is_system or (is_open and message.role == "user")):
            folded[-1] = replace(last if is_system else message, content=f"{last.content}\n\n{message.content}")
            is_open = is_open and is_system
        else:
            folded.append(replace(message, role="user") if is_system else message)
            is_open = is_system
    return folded


def read_template(path: Path) -> str | None:
    """The chat template in a model's folder; None if there is none.

    It is read from `chat_template.jinja`, `chat_template.json` or `tokenizer_config.json`, in this order. Of a list of
    named templates, it is the one called "default". Raises InvalidModelFile for a damaged file, CacheError for an
    unreadable one.
    """
    for file in (path / name for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")):
        with reading(file):
            try:
                text = file.read_text(encoding="utf-8")
                entry = text if file.suffix == ".jinja" else json.loads(text).get("chat_template")
                if isinstance(entry, list):
                    entry = next(each["template"] for each in entry if each["name"] == "default")
                if not isinstance(entry, str | None):
                    raise TypeError("it is no text")
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (ValueError, TypeError, LookupError, AttributeError, StopIteration, RecursionError) as error:
                raise InvalidModelFile(
                    f"{file} has no chat template that can be read: {reason_of(error)}.",
                    hint="Download the model again.",
                ) from error
        if entry is not None:
            return entry
    return None


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
    tokens, bos = tokenizer.encode(text, parse_special=parse_special), tokenizer.bos
    if bos is None:
        return tokens
    rest = list(dropwhile(lambda token: token == bos, tokens))
    return [bos, *rest] if tokenizer.add_bos or len(rest) < len(tokens) else tokens
