"""From the prompt of a request to tokens: template, beginning of the answer, tokenizer, limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.backends import Model
from edgespec.engine.events import AnswerStart
from edgespec.errors import InvalidRequest, PromptTooLong
from edgespec.text.chat_template import SHORTEN, ChatTemplate, Message, check_length, encode_prompt
from edgespec.text.reasoning import ReasoningFormat, detect_format

_TAIL = 256  # characters of the rendered prompt in which reasoning may begin


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

    def encode(
        self, prompt: str | tuple[Message, ...], variables: Mapping[str, Any], start: AnswerStart | None = None
    ) -> EncodedPrompt:
        """Raises InvalidRequest for an empty prompt, PromptTooLong, TemplateError."""
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
        if len(tokens) > size:
            message = f"the prompt has {len(tokens):,} tokens, the context holds {size:,}."
            raise PromptTooLong(message, hint=SHORTEN, n_prompt=len(tokens), n_context=size)
        return EncodedPrompt(tokens, tail, begun)

    def _write(self, start: AnswerStart, tail: str) -> str:
        if self.reasoning is None:
            return start.text
        return self.reasoning.write(start.reasoning, start.text, is_inside=self.reasoning.starts_inside(tail))
