"""Turns chat messages into the prompt: Jinja templates rendered under limits, and exactly one BOS."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import dropwhile
from pathlib import Path
from typing import Any

from edgespec.errors import (
    EdgespecError,
    InvalidModelFile,
    InvalidRequest,
    PromptTooLong,
    TemplateError,
    reading,
    reason_of,
)
from edgespec.isolated import ChildDied, Helper
from edgespec.text.template_probe import TemplateProfile, probe
from edgespec.text.tokenizer import Tokenizer
from edgespec.text.writing import (
    Messages,
    Writing,
    complete_calls,
    find_lost,
    give_tools,
    list_turns,
    make_skeleton,
    write_messages,
)

SHORTEN = "Shorten it, or set a larger --ctx."
MAX_CHARACTERS_PER_TOKEN = 64  # on average, over a whole text
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
    "add_generation_prompt": True,
    # If the reasoning of earlier answers is kept, what was generated remains a prefix of the prompt.
    "preserve_thinking": True,
    "clear_thinking": False,
}
RENDERER = Helper("edgespec.text.sandbox", None, deadline_s=2.0, max_bytes=2**29)
"""Renders the templates of this process. It takes 0.1 seconds to start."""

atexit.register(RENDERER.close)
os.register_at_fork(after_in_child=RENDERER.forget)


def ask_renderer(questions: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, str]]:
    """Render templates, each with its variables. Returns a kind and a text for each, see `sandbox.main`."""
    try:
        return [(kind, text) for kind, text in RENDERER.ask([*questions])]
    except ChildDied as error:
        return [("stopped", str(error))] * len(questions)


@lru_cache(32)
def profile_template(source: str) -> TemplateProfile:
    """What the template shows, and how its model writes. It is found once, in 0.1 seconds."""
    has_stopped = False

    def render(asked: Sequence[tuple[Messages, Mapping[str, Any]]]) -> list[str | None]:
        nonlocal has_stopped
        if has_stopped:  # a template that hangs would do so at each probe
            return [None] * len(asked)
        tokens = {"bos_token": "<|probebos|>", "eos_token": "<|probeeos|>"}
        outcomes = ask_renderer(
            [(source, {**_VARIABLES, **tokens, **given, "messages": messages}) for messages, given in asked]
        )
        has_stopped = any(kind == "stopped" for kind, _ in outcomes)
        return [text if kind == "prompt" else None for kind, text in outcomes]

    return probe(source, render)


_MAX_SOUND = 1024
_SOUND: dict[tuple[object, ...], Writing] = {}
"""A cache: the Writing in which a template has shown all of a conversation, by template and kinds of turns; see
`list_turns`.
"""


class _Refusal(InvalidRequest):
    """The template refused the conversation through `raise_exception`."""


class _Fault(TemplateError):
    """The template failed at the conversation; it may take another."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A model's chat template. `bos_text` and `eos_text` are the spellings of these tokens, "" if there is none.

    `render` may be called from any thread. Templates come from anywhere, so a process of its own runs them.
    """

    source: str
    bos_text: str
    eos_text: str

    @property
    def profile(self) -> TemplateProfile:
        return profile_template(self.source)

    def render(self, messages: Sequence[Message], *, variables: Mapping[str, Any] | None = None) -> str:
        """The prompt for `messages`; `variables` (JSON values) are visible to the template (`enable_thinking`).

        The prompt ends where the assistant's reply begins, or with the last message if the variable
        `add_generation_prompt` is false. It has the reasoning of earlier answers if the template has a switch for
        that, `preserve_thinking` or `clear_thinking`, unless a variable says otherwise.

        The text of each message, the names and arguments of each call and each result are in the prompt. If the
        template leaves one out, or refuses the conversation, it is written in other ways: system messages and results
        within messages of the user, calls one by one or in the text, tools described.

        Raises InvalidRequest with the template's own message if it refuses, or if a part cannot be shown, and
        TemplateError if it is malformed, fails, or exceeds its limits.
        """
        writing = self.profile.writing
        conversation = complete_calls([message.as_dict() for message in messages])
        turns = (self.source, bool(variables and variables.get("tools")), list_turns(conversation))
        error: EdgespecError | None = None
        for tried in dict.fromkeys((_SOUND.get(turns, writing), writing, *writing.variations())):
            try:
                text, lost = self._render_checked(
                    conversation, variables or {}, tried, is_known=_SOUND.get(turns) == tried
                )
            except (_Refusal, _Fault) as refused:
                error = error or refused
                continue
            if not lost:
                if len(_SOUND) >= _MAX_SOUND:
                    _SOUND.clear()
                _SOUND[turns] = tried
                return text
            error = error or InvalidRequest(
                f"the model's chat template leaves out {lost[0]}.",
                hint="Change the order or the roles of the messages.",
            )
        assert error is not None
        raise error

    def _render_checked(
        self, conversation: Messages, variables: Mapping[str, Any], writing: Writing, *, is_known: bool
    ) -> tuple[str, list[str]]:
        """The prompt, and what of the conversation is not in it. `is_known`: `writing` has shown all of a conversation
        with such turns before.
        """
        if is_known:
            (text,) = self._render([conversation], variables, writing)
            return text, find_lost(conversation, text)
        skeleton, words = make_skeleton(conversation)
        text, shown = self._render([conversation, skeleton], variables, writing)
        lost = [meaning for word, meaning in words.items() if word not in shown]
        return text, lost or find_lost(conversation, text)

    def _render(
        self, conversations: Sequence[Messages], variables: Mapping[str, Any], writing: Writing
    ) -> tuple[str, ...]:
        """Render the conversations, each rewritten as `writing` says. Raises InvalidRequest and TemplateError; see
        `render`.
        """
        given = {**_VARIABLES, **variables, "bos_token": self.bos_text, "eos_token": self.eos_text}
        tools, call_format = given.pop("tools", None), self.profile.call_format
        questions: list[tuple[str, Mapping[str, Any]]] = []
        for messages in conversations:
            placed, more = give_tools(messages, tools, writing, call_format) if tools else (messages, {})
            written = write_messages(placed, writing, call_format)
            questions.append((self.source, {**given, **more, "messages": written}))
        return tuple(_read_outcome(kind, text) for kind, text in ask_renderer(questions))


def _read_outcome(kind: str, text: str) -> str:
    if kind == "refusal":
        raise _Refusal(
            f"the model's chat template refuses this conversation: {text.rstrip('.')}.",
            hint="Change the order or the roles of the messages.",
        )
    if kind in ("fault", "stopped"):
        error = _Fault if kind == "fault" else TemplateError
        raise error(f"the chat template {text}.", hint="Use another file of this model or another template.")
    return text


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
    if len(text) > MAX_CHARACTERS_PER_TOKEN * context_size:
        raise PromptTooLong(
            f"the text has {len(text):,} characters, far more than a context of {context_size:,} tokens holds.",
            hint=SHORTEN,
            n_prompt=-(-len(text) // MAX_CHARACTERS_PER_TOKEN),
            n_context=context_size,
        )


def encode_prompt(tokenizer: Tokenizer, text: str, *, parse_special: bool) -> list[int]:
    """Token ids of a prompt, with one BOS in front if the model uses it or the text begins with it."""
    return place_bos(tokenizer, tokenizer.encode(text, parse_special=parse_special))


def place_bos(tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
    """`tokens` with one BOS in front if the model uses it or they begin with it.

    There is never a second BOS, even if both the template and the tokenizer add one.
    """
    bos = tokenizer.bos
    if bos is None:
        return tokens
    rest = list(dropwhile(lambda token: token == bos, tokens))
    return [bos, *rest] if tokenizer.add_bos or len(rest) < len(tokens) else tokens
