"""/v1/completions: OpenAI's interface to raw text completion, without a chat template."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Annotated, Any

from pydantic import Field

from edgespec.engine.events import Gap, PromptScores, Scored, TokenPrompt
from edgespec.errors import InvalidRequest
from edgespec.server.choices import ChoicesWriter, format_score, make_choice
from edgespec.server.constraints import ConstrainedBody
from edgespec.server.control_fields import DraftingBody
from edgespec.server.fields import Tokens
from edgespec.service.generation_spec import GenerationSpec
from edgespec.service.response import Done, Part, ReasoningDelta, Started, TextDelta, new_id

_DEFAULT_MAX_TOKENS = 16  # OpenAI's default
_MAX_ANSWERS = 128
TokenIds = Annotated[
    list[Annotated[int, Field(strict=True, ge=0)]], Field(min_length=1, max_length=2**20, fail_fast=True)
]


class CompletionRequest(ConstrainedBody, DraftingBody):
    """The body of /v1/completions. All constraints are extensions."""

    prompt: str | TokenIds | Annotated[list[str | TokenIds], Field(min_length=1, max_length=128, fail_fast=True)]
    max_tokens: Tokens | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def writer(self) -> CompletionWriter:
        return CompletionWriter(self)

    def prompts(self) -> list[str | tuple[int, ...]]:
        """Each a text or token ids."""
        prompts: Any = self.prompt
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts]
        return [each if isinstance(each, str) else tuple(each) for each in prompts]

    def generation_specs(self) -> list[GenerationSpec]:
        """One for each prompt. Raises InvalidRequest."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest("best_of is not supported.", hint="Remove best_of.")
        prompts = self.prompts()
        if len(prompts) * (self.n or 1) > _MAX_ANSWERS:
            raise InvalidRequest(f"more than {_MAX_ANSWERS} answers are asked for.", hint="Send fewer prompts.")
        if self.echo and self.logprobs is None and not all(isinstance(each, str) for each in prompts):
            raise InvalidRequest("echo of token ids needs logprobs.", hint="Set logprobs to 0.")
        return [self._spec(prompt) for prompt in prompts]

    def _spec(self, prompt: str | tuple[int, ...]) -> GenerationSpec:
        if self.suffix and not isinstance(prompt, str):
            raise InvalidRequest("suffix needs a prompt as text.", hint="Send the prompt as text.")
        text = Gap(prompt, self.suffix) if self.suffix and isinstance(prompt, str) else prompt
        return GenerationSpec(
            prompt=TokenPrompt(text) if isinstance(text, tuple) else text,
            settings=self.settings(),
            max_tokens=_DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            seed=self.seed,
            stop=self.stops(),
            structure=self.structure(),
            top_logprobs=self.logprobs,
            scores_prompt=bool(self.echo) and self.logprobs is not None,
            draft_length=self.draft_length(),
        )


class CompletionWriter(ChoicesWriter):
    """The answers to one request, as a body or as chunks."""

    def __init__(self, request: CompletionRequest) -> None:
        super().__init__(request, {"id": new_id("cmpl-"), "object": "text_completion"}, "text_completion")
        texts = [each if isinstance(each, str) else "" for each in request.prompts()]
        self._echoes = texts if request.echo else [""] * len(texts)
        self._texts: dict[int, str] = {}
        self._offsets: dict[int, int] = {}  # characters before the next token's logprobs

    def _echo(self, index: int) -> str:
        """The prompt of an answer, if it is repeated; that of token ids comes with their scores."""
        return self._echoes[index // self._copies]

    def add(self, index: int, part: Part) -> None:
        self._texts.setdefault(index, self._echo(index))
        if isinstance(part, TextDelta | ReasoningDelta):
            self._texts[index] += part.text
        elif isinstance(part, PromptScores):
            self._scores[index] = _format_prompt(part)
            self._texts[index] = self._texts[index] or _join(self._scores[index])
        elif isinstance(part, Scored):
            self._scores.setdefault(index, []).append(format_score(part))
        elif isinstance(part, Done):
            self._ends[index] = part

    def response_body(self) -> dict[str, Any]:
        return self._body([self._choice(index, text) for index, text in sorted(self._texts.items())])

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        scores, logprobs = self._scores.get(index), None
        if scores is not None:
            logprobs = _format_logprobs(scores, 0)  # the prompt is among them where it is repeated
        return make_choice(index, {"text": text}, self._ends[index].reason, logprobs)

    def chunks(self, index: int, part: Part) -> Iterator[bytes]:
        if isinstance(part, PromptScores):
            scores = _format_prompt(part)
            text = self._echo(index) or _join(scores)
            self._offsets[index] = len(text)
            yield self._text_chunk(index, text, logprobs=_format_logprobs(scores, 0))
        elif isinstance(part, Started) and index not in self._offsets:
            self._offsets[index] = len(echo := self._echo(index))
            if echo:
                yield self._text_chunk(index, echo)
        elif isinstance(part, TextDelta | ReasoningDelta):
            yield self._text_chunk(index, part.text, logprobs=self._take_scores(index))
        elif isinstance(part, Scored):
            self._scores.setdefault(index, []).append(format_score(part))
        elif isinstance(part, Done):
            self._ends[index] = part
            yield self._text_chunk(index, "", part.reason, self._take_scores(index), **part.extensions())

    def _take_scores(self, index: int) -> dict[str, Any] | None:
        """The logprobs of the tokens whose text is about to be sent."""
        if (scores := self._scores.pop(index, None)) is None:
            return None
        offset = self._offsets[index]
        self._offsets[index] += len(_join(scores))
        return _format_logprobs(scores, offset)

    def _text_chunk(
        self, index: int, text: str, reason: str | None = None, logprobs: dict[str, Any] | None = None, **extra: Any
    ) -> bytes:
        return self._chunk([make_choice(index, {"text": text}, reason, logprobs)], **extra)


def _format_prompt(scores: PromptScores) -> list[dict[str, Any]]:
    """The logprobs of the prompt's tokens; one that nothing comes before has none."""
    if scores.first is None:
        return list(map(format_score, scores.tokens))
    first = {"token": scores.first.decode("utf-8", "replace"), "logprob": None, "top_logprobs": None}
    return [first, *map(format_score, scores.tokens)]


def _join(scores: list[dict[str, Any]]) -> str:
    return "".join(score["token"] for score in scores)


def _format_logprobs(scores: list[dict[str, Any]], offset: int) -> dict[str, Any]:
    """The logprobs of consecutive tokens as parallel lists; `offset` is the number of characters before them."""
    tokens = [score["token"] for score in scores]
    return {
        "tokens": tokens,
        "token_logprobs": [score["logprob"] for score in scores],
        "top_logprobs": [
            None if score["top_logprobs"] is None else {top["token"]: top["logprob"] for top in score["top_logprobs"]}
            for score in scores
        ],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)),
    }
