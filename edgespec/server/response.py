"""Events of the engine as parts of a reply: reasoning, text, tool calls, scores; and what was counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from edgespec.core.metrics import Metrics
from edgespec.core.protocols import PrefillProgress
from edgespec.engine.events import Event, Finished, Scored, TokenScores
from edgespec.server.chat_format import Reader
from edgespec.text.harmony import Thought
from edgespec.text.stream import Piece
from edgespec.text.toolcalls import Found, ToolCall

Ending = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Started:
    """The first part: the prompt is being read, `cached_tokens` of which had been read before."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The call number `index` of the reply."""

    index: int
    call: ToolCall


@dataclass(frozen=True, slots=True)
class Done:
    """The last part. `plain_speed` is that of a single answer in tokens a second, where it has been measured."""

    reason: Ending
    stop: str | None
    metrics: Metrics
    plain_speed: float | None

    def timings(self) -> dict[str, float | int | None]:
        """Times in milliseconds under llama.cpp's names, and tau and the ratio to plain decoding under ours."""
        m = self.metrics
        speed = m.tokens_per_second
        return {
            "prompt_n": m.prompt_tokens,
            "prompt_ms": round(m.prefill_s * 1000, 3),
            "predicted_n": m.emitted_tokens,
            "predicted_ms": round((m.tpot_s or 0.0) * max(0, m.emitted_tokens - 1) * 1000, 3),
            "predicted_per_second": speed,
            "draft_n": m.drafted_tokens,
            "draft_n_accepted": m.accepted_tokens,
            "tau": m.tau,
            "plain_per_second": self.plain_speed,
            "times_plain": m.times_plain,
        }


Part = Started | ReasoningDelta | TextDelta | ToolCallDelta | Scored | Done


def usage_of(ends: list[Done]) -> dict[str, Any]:
    """Tokens of all answers to one call, as OpenAI counts them: the prompt once."""
    prompt = ends[0].metrics.prompt_tokens
    completion = sum(end.metrics.emitted_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": ends[0].metrics.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": sum(end.metrics.reasoning_tokens for end in ends)},
    }


def merged(parts: list[Part]) -> list[Part]:
    """The same with texts that follow each other joined."""
    out: list[Part] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, TextDelta) and isinstance(last, TextDelta):
            out[-1] = TextDelta(last.text + part.text)
        elif isinstance(part, ReasoningDelta) and isinstance(last, ReasoningDelta):
            out[-1] = ReasoningDelta(last.text + part.text)
        else:
            out.append(part)
    return out


class ResponseStream:
    """One answer as it comes."""

    def __init__(self, reader: Reader | None, plain_speed: float | None, *, is_several: bool = True) -> None:
        """`reader` splits the text; None where all of it is the answer. Unless `is_several`, calls after the first
        are left out.
        """
        self._reader = reader
        self._plain_speed = plain_speed
        self._is_several = is_several
        self._calls = 0
        self._has_begun = False

    def parts(self, event: Event) -> Iterator[Part]:
        """What `event` adds."""
        if isinstance(event, PrefillProgress) and not self._has_begun:
            self._has_begun = True
            yield Started(event.total, event.reused)
        elif isinstance(event, TokenScores):
            yield from event.tokens
        elif isinstance(event, Piece):
            if event.channel == "reasoning":
                yield ReasoningDelta(event.text)
            elif self._reader is None:
                yield TextDelta(event.text)
            else:
                yield from self._found(self._reader.push(event.text))
        elif isinstance(event, Finished):
            if self._reader is not None:
                yield from self._found(self._reader.finish())
            if not self._has_begun:  # it was ended before
                yield Started(event.metrics.prompt_tokens, event.metrics.cached_tokens)
            reason: Ending = "length" if event.reason != "stop" else "tool_calls" if self._calls else "stop"
            yield Done(reason, event.stop, event.metrics, self._plain_speed)

    def _found(self, found: Iterable[Found | Thought]) -> Iterator[Part]:
        for each in found:
            if isinstance(each, str):
                yield TextDelta(each)
            elif isinstance(each, Thought):
                yield ReasoningDelta(each.text)
            elif self._is_several or not self._calls:
                yield ToolCallDelta(self._calls, each)
                self._calls += 1
