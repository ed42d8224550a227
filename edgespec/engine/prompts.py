"""Encodes the prompt of a request: template, beginning of the answer, tokenizer, limits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from string import Formatter
from typing import Any

from edgespec.backends import Model
from edgespec.cancel import check_cancelled
from edgespec.core.peers import YIELD, Yield
from edgespec.engine.events import AnswerStart, Gap, Prompt, TokenPrompt
from edgespec.errors import InvalidRequest, PromptTooLong
from edgespec.text.call_format import JsonArguments
from edgespec.text.chat_template import (
    MAX_CHARACTERS_PER_TOKEN,
    PLAIN,
    SHORTEN,
    ChatTemplate,
    Message,
    check_length,
    encode_prompt,
    place_bos,
)
from edgespec.text.control_text import ControlText
from edgespec.text.reasoning import ReasoningFormat
from edgespec.text.tokenizer import join_start

_NUMBER = re.compile(r"^ *\d+(?:\t|: |→|\| )", re.MULTILINE)  # the number of a line of a file, as agents show it
_MAX_QUOTES = 512  # quotes that are remembered
_TAIL = 256  # characters of the rendered prompt in which reasoning may begin

_GAPS = (
    "<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>",
    "<fim_prefix>{before}<fim_suffix>{after}<fim_middle>",
    "<fim-prefix>{before}<fim-suffix>{after}<fim-middle>",
    "<｜fim▁begin｜>{before}<｜fim▁hole｜>{after}<｜fim▁end｜>",  # noqa: RUF001
    "<PRE>{before}<SUF>{after}<MID>",
    "[SUFFIX]{after}[PREFIX]{before}",  # Codestral
)
"""How families of models write a gap; the model writes at the end."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the model reads it.

    tokens  of the prompt and of the beginning of the answer
    tail    the end of the rendered prompt, which shows whether the model begins inside its reasoning
    start   the beginning of the answer as the model writes it, with the markers of its reasoning
    """

    tokens: list[int]
    tail: str
    start: str


class PromptEncoder:
    """Encodes the prompts for one model."""

    def __init__(self, model: Model) -> None:
        tokenizer, source = model.tokenizer, model.chat_template
        bos, eos = ("" if t is None else tokenizer.special_text(t) for t in (tokenizer.bos, tokenizer.eos))
        self._model = model
        self.template = ChatTemplate(source or PLAIN, bos, eos)
        self.reasoning: ReasoningFormat | None = self.template.profile.reasoning
        self._has_json_calls = isinstance(self.template.profile.calls.arguments, JsonArguments)
        self._quotes: dict[str, list[int]] = {}  # of the last prompts, by what tools have said
        # What was counted last, until it is generated from: a chat counts before it asks. Any thread sets it.
        self._counted: tuple[tuple[Any, ...], EncodedPrompt] | None = None

    def encode(self, prompt: Prompt, variables: Mapping[str, Any], start: AnswerStart | None = None) -> EncodedPrompt:
        """Raises InvalidRequest for an empty prompt, PromptTooLong, TemplateError."""
        encoded = self._encode(prompt, variables, start)
        self._counted = None
        self._require_fit(encoded.tokens)
        return encoded

    def read(self, text: str | Sequence[int], *, truncate: bool = False) -> list[int]:
        """The tokens of a text as it stands, or these token ids; with `truncate`, those that fit into the context.

        Raises InvalidRequest, PromptTooLong.
        """
        size = self._model.context_size
        if truncate and isinstance(text, str):
            text = text[: MAX_CHARACTERS_PER_TOKEN * size]
        tokens = self._tokenize(text) if isinstance(text, str) else self._check_ids(text)
        if truncate:
            return tokens[:size]
        self._require_fit(tokens)
        return tokens

    def quote(self, prompt: Prompt) -> list[int]:
        """What tools have said in `prompt`, as a call of a tool would quote it: lines without numbers, in JSON.

        An agent that edits a file quotes what it has read.
        """
        said = [each.content for each in prompt if each.role == "tool"] if isinstance(prompt, tuple) else []
        quoted = {text: self._quotes.pop(text, []) or self._write_quote(text) for text in said}
        self._quotes |= quoted  # behind those that were used before
        while len(self._quotes) > max(_MAX_QUOTES, len(quoted)):
            del self._quotes[next(iter(self._quotes))]
        return list(chain.from_iterable(quoted.values()))

    def render(self, messages: tuple[Message, ...]) -> str:
        """The messages as the model reads them, as text. Raises TemplateError."""
        return self.template.render(messages)

    def count(self, prompt: Prompt, variables: Mapping[str, Any], start: AnswerStart | None = None) -> int:
        """The number of tokens, also of a prompt that the context does not hold. Raises what `encode` raises.

        It may be called on another thread than the model's while the model is open.
        """
        encoded = self._encode(prompt, variables, start)
        self._counted = (prompt, dict(variables), start), encoded
        return len(encoded.tokens)

    def _write_quote(self, text: str) -> list[int]:
        plain = _NUMBER.sub("", text)
        quoted = json.dumps(plain, ensure_ascii=False)[1:-1] if self._has_json_calls else plain
        return self._model.tokenizer.encode(quoted, parse_special=False)

    def _encode(self, prompt: Prompt, variables: Mapping[str, Any], start: AnswerStart | None) -> EncodedPrompt:
        """A prompt of any length; the one that was counted last is not read again."""
        if (counted := self._counted) is not None and counted[0] == (prompt, dict(variables), start):
            return counted[1]
        if isinstance(prompt, TokenPrompt):
            return EncodedPrompt(self._check_ids(prompt.tokens), "", "")
        if isinstance(prompt, tuple):
            return self._encode_messages(prompt, variables, start)
        text, begun = self._mark(prompt) if isinstance(prompt, Gap) else prompt, self._begin("", start)
        whole = join_start(self._model.tokenizer, text, begun)
        return EncodedPrompt(self._tokenize(whole), text[-_TAIL:], begun)

    def _encode_messages(
        self, messages: tuple[Message, ...], variables: Mapping[str, Any], start: AnswerStart | None
    ) -> EncodedPrompt:
        """The messages of a chat, in which only the template's own text becomes control tokens."""
        control = self._control
        hidden = [Message(each.role, control.hide(each.content), control.hide(each.extra)) for each in messages]
        tools = {name: control.hide(value) for name, value in variables.items() if name == "tools"}
        text = self.template.render(hidden, variables={**variables, **tools})
        if start is not None:
            start = AnswerStart(control.hide(start.text), control.hide(start.reasoning))
        begun = self._begin(text, start)
        check_length(text, self._model.context_size)
        whole = join_start(self._model.tokenizer, text, begun)
        tokens = place_bos(self._model.tokenizer, control.encode(whole)) if whole else []
        return EncodedPrompt(self._require_tokens(tokens), text[-_TAIL:], control.show(begun))

    def _begin(self, text: str, start: AnswerStart | None) -> str:
        """The beginning of the answer to the prompt `text`, as the model writes it."""
        if start is None or self.reasoning is None:
            return start.text if start is not None else ""
        is_inside = self.reasoning.starts_inside(text[-_TAIL:])
        return self.reasoning.write(start.reasoning, start.text, is_inside=is_inside)

    @cached_property
    def _control(self) -> ControlText:
        return ControlText(self._model.tokenizer)

    def _require_fit(self, tokens: Sequence[int]) -> None:
        n_prompt, size = len(tokens), self._model.context_size
        if n_prompt > size:
            message = f"the prompt has {n_prompt:,} tokens, the context holds {size:,}."
            raise PromptTooLong(message, hint=SHORTEN, n_prompt=n_prompt, n_context=size)

    def _tokenize(self, text: str) -> list[int]:
        check_length(text, self._model.context_size)
        return self._require_tokens(encode_prompt(self._model.tokenizer, text, parse_special=True) if text else [])

    def _require_tokens(self, tokens: list[int]) -> list[int]:
        if not tokens:
            raise InvalidRequest("the prompt is empty.", hint="Write something to continue or answer.")
        return tokens

    def _check_ids(self, tokens: Sequence[int]) -> list[int]:
        known = self._model.tokenizer.vocab_size
        if not tokens or not 0 <= min(tokens) <= max(tokens) < known:
            raise InvalidRequest(f"a prompt of token ids has ids below {known:,}.", hint="Send ids of this model.")
        return list(tokens)

    def _mark(self, gap: Gap) -> str:
        """The text around a gap with the markers of the vocabulary."""
        tokenizer = self._model.tokenizer
        for form in _GAPS:
            markers = [marker for marker, *_ in Formatter().parse(form)]
            if all(len(tokenizer.encode(marker, parse_special=True)) == 1 for marker in markers):
                return form.format(before=gap.before, after=gap.after)
        raise InvalidRequest("this model has no markers for a suffix.", hint="Remove suffix.")


@dataclass(frozen=True, slots=True)
class Embedding:
    """A vector of length 1, and the number of tokens of its text."""

    vector: tuple[float, ...]
    tokens: int


def embed(model: Model, texts: Sequence[str | Sequence[int]], *, truncate: bool = False) -> Iterator[Embedding | Yield]:
    """Yield an embedding for each text, in order; a text may be token ids. With `truncate`, the end of a text that the
    context does not hold is left out. Raises InvalidRequest, PromptTooLong, BackendError, Cancelled.
    """
    prompts, read = PromptEncoder(model), list[list[int]]()
    for text in texts:
        check_cancelled()
        yield YIELD
        read.append(prompts.read(text, truncate=truncate))
    embedder = model.open_embedder(max(map(len, read)))
    try:
        for tokens in read:
            vector = yield from embedder.embed(tokens)
            yield Embedding(tuple(vector.tolist()), len(tokens))
    finally:
        embedder.close()
