"""/v1/completions: OpenAI's older interface, text continued as it stands."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from edgespec.engine.events import Scored
from edgespec.errors import InvalidRequest
from edgespec.server.chat import FINGERPRINT
from edgespec.server.fields import ResponseFormat, Sampled, Tokens
from edgespec.server.generation_spec import GenerationSpec
from edgespec.server.http import DONE, event_of
from edgespec.server.response import Done, Part, ReasoningDelta, TextDelta, usage_of

_DEFAULT_TOKENS = 16  # as OpenAI has it


class CompletionRequest(Sampled):
    """The body of /v1/completions. `response_format` is ours."""

    prompt: str | list[Any]
    max_tokens: Tokens | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None

    def writer(self) -> CompletionWriter:
        return CompletionWriter(self)

    def text(self) -> str:
        """Raises InvalidRequest."""
        given = self.prompt
        if isinstance(given, list) and len(given) == 1:
            given = given[0]
        if not isinstance(given, str):
            raise InvalidRequest("the prompt is no single text.", hint="Send one text; token ids are not taken.")
        return given

    def generation_spec(self) -> GenerationSpec:
        """Raises InvalidRequest."""
        if self.suffix:
            raise InvalidRequest("text cannot be filled in before a suffix.", hint="Leave suffix out.")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest("the best of several answers is not chosen.", hint="Leave best_of out.")
        return GenerationSpec(
            prompt=self.text(),
            settings=self.settings(),
            max_tokens=self.max_tokens or _DEFAULT_TOKENS,
            seed=self.seed,
            stop=self.stops(),
            structure=self.response_format.structure() if self.response_format else None,
            top_logprobs=self.logprobs,
        )


class CompletionWriter:
    """The answers to one call, whole or as events."""

    def __init__(self, request: CompletionRequest) -> None:
        self._wants_usage = request.wants_usage
        self._echo = request.text() if request.echo else ""
        self._head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()),
                      "model": request.model, "system_fingerprint": FINGERPRINT}  # fmt: skip
        self._texts: dict[int, str] = {}
        self._scores: dict[int, list[Scored]] = {}
        self._scored: dict[int, int] = {}  # characters of the texts of scores that have been sent
        self._ends: dict[int, Done] = {}

    def add(self, index: int, part: Part) -> None:
        self._texts.setdefault(index, self._echo)
        if isinstance(part, TextDelta | ReasoningDelta):
            self._texts[index] += part.text
        elif isinstance(part, Scored):
            self._scores.setdefault(index, []).append(part)
        elif isinstance(part, Done):
            self._ends[index] = part

    def response_body(self) -> dict[str, Any]:
        choices = [
            {"index": i, "text": text, "finish_reason": self._ends[i].reason,
             "logprobs": _scores(self._scores[i], len(self._echo)) if i in self._scores else None}
            for i, text in sorted(self._texts.items())
        ]  # fmt: skip
        ends = list(self._ends.values())
        return {**self._head, "choices": choices, "usage": usage_of(ends), "timings": ends[0].timings()}

    def chunks(self, index: int, part: Part) -> Iterator[bytes]:
        if index not in self._texts:
            self._texts[index] = self._echo
            if self._echo:
                yield self._event(index, self._echo)
        if isinstance(part, TextDelta | ReasoningDelta):
            self._texts[index] += part.text
            yield self._event(index, part.text)
        elif isinstance(part, Scored):
            offset = self._scored.get(index, len(self._echo))
            self._scored[index] = offset + len(part.text.decode("utf-8", "replace"))
            yield self._event(index, "", logprobs=_scores([part], offset))
        elif isinstance(part, Done):
            self._ends[index] = part
            yield self._event(index, "", part.reason, timings=part.timings())

    def finish(self) -> Iterator[bytes]:
        if self._wants_usage:
            yield event_of({**self._head, "choices": [], "usage": usage_of(list(self._ends.values()))})
        yield DONE

    def _event(
        self,
        index: int,
        text: str,
        reason: str | None = None,
        *,
        logprobs: dict[str, Any] | None = None,
        **more: Any,
    ) -> bytes:
        choice = {"index": index, "text": text, "finish_reason": reason, "logprobs": logprobs}
        return event_of({**self._head, "choices": [choice], **more})


def _scores(scores: list[Scored], offset: int) -> dict[str, Any]:
    """OpenAI's older form: lists side by side."""
    texts = [score.text.decode("utf-8", "replace") for score in scores]
    offsets = [offset]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    top = [{text.decode("utf-8", "replace"): max(p, -9999.0) for text, p in score.top} for score in scores]
    return {"tokens": texts, "token_logprobs": [max(score.logprob, -9999.0) for score in scores], "top_logprobs": top,
            "text_offset": offsets}  # fmt: skip
