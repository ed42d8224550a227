"""/v1/completions: OpenAI's interface to raw text completion, without a chat template."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Annotated, Any

from pydantic import Field

from edgespec.engine.events import Scored
from edgespec.errors import InvalidRequest
from edgespec.server.choices import ChoicesWriter, format_score, make_choice
from edgespec.server.constraints import ConstrainedBody
from edgespec.server.fields import Tokens
from edgespec.service.generation_spec import GenerationSpec
from edgespec.service.response import Done, Part, ReasoningDelta, TextDelta, new_id

_DEFAULT_MAX_TOKENS = 16  # OpenAI's default


class CompletionRequest(ConstrainedBody):
    """The body of /v1/completions. All constraints are extensions."""

    prompt: str | list[Any]
    max_tokens: Tokens | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def writer(self) -> CompletionWriter:
        return CompletionWriter(self)

    def text(self) -> str:
        """The prompt. Raises InvalidRequest if it is not one string."""
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            raise InvalidRequest("the prompt must be one string.", hint="Send one prompt per request, as text.")
        return prompt

    def generation_spec(self) -> GenerationSpec:
        """Raises InvalidRequest."""
        if self.suffix:
            raise InvalidRequest("suffix is not supported.", hint="Remove suffix.")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest("best_of is not supported.", hint="Remove best_of.")
        return GenerationSpec(
            prompt=self.text(),
            settings=self.settings(),
            max_tokens=self.max_tokens or _DEFAULT_MAX_TOKENS,
            seed=self.seed,
            stop=self.stops(),
            structure=self.structure(),
            top_logprobs=self.logprobs,
        )


class CompletionWriter(ChoicesWriter):
    """The answers to one request, as a body or as chunks."""

    def __init__(self, request: CompletionRequest) -> None:
        super().__init__(request, {"id": new_id("cmpl-"), "object": "text_completion"}, "text_completion")
        self._echo = request.text() if request.echo else ""
        self._texts: dict[int, str] = {}
        self._offsets: dict[int, int] = {}  # characters before the next token's logprobs

    def add(self, index: int, part: Part) -> None:
        self._texts.setdefault(index, self._echo)
        if isinstance(part, TextDelta | ReasoningDelta):
            self._texts[index] += part.text
        elif isinstance(part, Scored):
            self._scores.setdefault(index, []).append(format_score(part))
        elif isinstance(part, Done):
            self._ends[index] = part

    def response_body(self) -> dict[str, Any]:
        return self._body(
            [
                make_choice(
                    i,
                    {"text": text},
                    self._ends[i].reason,
                    _format_logprobs(self._scores[i], len(self._echo)) if i in self._scores else None,
                )
                for i, text in sorted(self._texts.items())
            ]
        )

    def chunks(self, index: int, part: Part) -> Iterator[bytes]:
        if index not in self._offsets:
            self._offsets[index] = len(self._echo)
            if self._echo:
                yield self._text_chunk(index, self._echo)
        if isinstance(part, TextDelta | ReasoningDelta):
            yield self._text_chunk(index, part.text)
        elif isinstance(part, Scored):
            score, offset = format_score(part), self._offsets[index]
            self._offsets[index] += len(score["token"])
            yield self._text_chunk(index, "", logprobs=_format_logprobs([score], offset))
        elif isinstance(part, Done):
            self._ends[index] = part
            yield self._text_chunk(index, "", part.reason, **part.extensions())

    def _text_chunk(
        self, index: int, text: str, reason: str | None = None, logprobs: dict[str, Any] | None = None, **extra: Any
    ) -> bytes:
        return self._chunk([make_choice(index, {"text": text}, reason, logprobs)], **extra)


def _format_logprobs(scores: list[dict[str, Any]], offset: int) -> dict[str, Any]:
    """The logprobs of consecutive tokens as parallel lists; `offset` is the number of characters before them."""
    tokens = [score["token"] for score in scores]
    return {
        "tokens": tokens,
        "token_logprobs": [score["logprob"] for score in scores],
        "top_logprobs": [{top["token"]: top["logprob"] for top in score["top_logprobs"]} for score in scores],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)),
    }
