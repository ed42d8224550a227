"""From the prompt of a request to tokens: template, beginning of the answer, tokenizer, limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.backends import Model
from edgespec.engine.events import AnswerStart, Gap, Prompt, TokenPrompt
from edgespec.errors import InvalidRequest, PromptTooLong
from edgespec.text.chat_template import SHORTEN, ChatTemplate, check_length, encode_prompt
from edgespec.text.reasoning import ReasoningFormat, detect_format

_TAIL = 256  # characters of the rendered prompt in which reasoning may begin

_GAP_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
    ("<PRE>", "<SUF>", "<MID>"),
)
"""What stands before the text, before what follows the gap, and where the model writes."""


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
        self._template = ChatTemplate(source, bos, eos) if source else None
        self.reasoning: ReasoningFormat | None = detect_format(source) if source else None

    def encode(self, prompt: Prompt, variables: Mapping[str, Any], start: AnswerStart | None = None) -> EncodedPrompt:
        """Raises InvalidRequest for an empty prompt, PromptTooLong, TemplateError."""
        if isinstance(prompt, TokenPrompt):
            return self._take(prompt)
        if isinstance(prompt, Gap):
            prompt = self._mark(prompt)
        if isinstance(prompt, str):
            text = prompt
        elif self._template is not None:
            text = self._template.render(prompt, variables=variables)
        else:
            text = "".join(message.content for message in prompt)
        tail = text[-_TAIL:]
        begun = self._write(start, tail) if start is not None else ""
        size = self._model.context_size
        check_length(text + begun, size)
        tokens = encode_prompt(self._model.tokenizer, text + begun, parse_special=True) if text + begun else []
        if not tokens:
            raise InvalidRequest("the prompt is empty.", hint="Write something to continue or answer.")
        _require_fit(len(tokens), size)
        return EncodedPrompt(tokens, tail, begun)

    def _take(self, prompt: TokenPrompt) -> EncodedPrompt:
        tokens, size, known = list(prompt.tokens), self._model.context_size, self._model.tokenizer.vocab_size
        if not tokens or not 0 <= min(tokens) <= max(tokens) < known:
            raise InvalidRequest(f"a prompt of token ids has ids below {known:,}.", hint="Correct the prompt.")
        _require_fit(len(tokens), size)
        return EncodedPrompt(tokens, "", "")

    def _mark(self, gap: Gap) -> str:
        """The text around a gap with the markers of the vocabulary."""
        tokenizer = self._model.tokenizer
        for before, after, middle in _GAP_MARKERS:
            if all(len(tokenizer.encode(each, parse_special=True)) == 1 for each in (before, after, middle)):
                return f"{before}{gap.before}{after}{gap.after}{middle}"
        raise InvalidRequest("this model has no markers for a suffix.", hint="Remove suffix.")

    def _write(self, start: AnswerStart, tail: str) -> str:
        if self.reasoning is None:
            return start.text
        return self.reasoning.write(start.reasoning, start.text, is_inside=self.reasoning.starts_inside(tail))


def _require_fit(n_prompt: int, size: int) -> None:
    if n_prompt > size:
        message = f"the prompt has {n_prompt:,} tokens, the context holds {size:,}."
        raise PromptTooLong(message, hint=SHORTEN, n_prompt=n_prompt, n_context=size)
