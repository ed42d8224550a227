"""ResponseStream: the engine's events as parts of an answer (reasoning, text, tool calls, logprobs), and its usage."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

from edgespec.core.metrics import Metrics, Reading, ReadingClock
from edgespec.core.protocols import PrefillProgress
from edgespec.engine.events import Event, Finished, PrefixLoss, PromptScores, Scored
from edgespec.text.harmony import Thought
from edgespec.text.readers import Reader
from edgespec.text.stream import Piece
from edgespec.text.tool_calls import AnswerPart, CallDelta, CallEnd, CallStart, ToolCall

Ending = Literal["stop", "length", "repetition", "tool_calls", "content_filter"]
CUT: tuple[Ending, ...] = ("length", "repetition", "content_filter")
"""Endings of an answer that the model has not ended itself. The last one comes from other servers only."""


@dataclass(frozen=True, slots=True)
class Started:
    """The first part: prefill has started. `cached_tokens` of the prompt are already in the KV cache."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The last part.

    warnings  what of the request was not followed, in sentences
    reported  the timings that another server has reported; None: they follow from the metrics
    loss      why a part of the prompt was read again
    """

    reason: Ending
    stop: str | None
    metrics: Metrics
    warnings: tuple[str, ...] = ()
    reported: Mapping[str, Any] | None = None
    loss: PrefixLoss | None = None

    def extensions(self) -> dict[str, Any]:
        """The fields of an answer that no interface has: `timings`, and `warnings` if there are any."""
        timings = self.timings() if self.reported is None else dict(self.reported)
        return {"timings": timings, **({"warnings": list(self.warnings)} if self.warnings else {})}

    def timings(self) -> dict[str, float | int | str]:
        """Counts and times in milliseconds under llama.cpp's names, with tau and the speedup over plain decoding if
        they are known, and the tokens that were read again with the reason. `predicted_*` leave out the time of the
        first token, which the prompt's forward has computed.
        """
        m = self.metrics
        n_read, n_after = m.prompt_tokens - m.cached_tokens, max(0, m.emitted_tokens - 1)
        plain = m.tokens_per_second / m.speedup if m.tokens_per_second and m.speedup else None
        own = {"tau": m.tau, "plain_per_second": plain, "speedup": m.speedup}
        lost: dict[str, int | str] = (
            {} if self.loss is None else {"cache_lost_n": self.loss.tokens, "cache_lost_reason": str(self.loss)}
        )
        return {
            "cache_n": m.cached_tokens,
            **lost,
            "prompt_n": n_read,
            **_format_rate("prompt", n_read, m.prefill_s),
            "predicted_n": m.emitted_tokens,
            **_format_rate("predicted", n_after, (m.tpot_s or 0.0) * n_after),
            "draft_n": m.drafted_tokens,
            "draft_n_accepted": m.accepted_tokens,
            **{name: value for name, value in own.items() if value is not None},
        }


def _format_rate(name: str, n: int, seconds: float) -> dict[str, float]:
    """llama.cpp's fields for `n` tokens in `seconds`. Rates for which nothing was measured are 0."""
    return {
        f"{name}_ms": round(seconds * 1000, 3),
        f"{name}_per_token_ms": seconds * 1000 / n if n else 0.0,
        f"{name}_per_second": n / seconds if seconds else 0.0,
    }


Part = Started | Reading | ReasoningDelta | TextDelta | CallStart | CallDelta | CallEnd | PromptScores | Scored | Done


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def count_usage(ends: list[Done], copies: int | None = None) -> dict[str, Any]:
    """Tokens of all answers to one request as OpenAI counts them: each prompt once. `copies`: answers to a prompt;
    None: there is one prompt.
    """
    firsts = ends[:: copies or len(ends)]
    prompt = sum(end.metrics.prompt_tokens for end in firsts)
    completion = sum(end.metrics.emitted_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(end.metrics.cached_tokens for end in firsts)},
        "completion_tokens_details": {"reasoning_tokens": sum(end.metrics.reasoning_tokens for end in ends)},
    }


def merge_deltas(parts: list[Part]) -> list[Part]:
    """`parts` with consecutive deltas of one kind joined."""
    out: list[Part] = []
    for part in parts:
        match out[-1:], part:
            case [TextDelta(before)], TextDelta(text):
                out[-1] = TextDelta(before + text)
            case [ReasoningDelta(before)], ReasoningDelta(text):
                out[-1] = ReasoningDelta(before + text)
            case [CallDelta(index, before)], CallDelta(arguments=text):  # of one call: its end lies between two
                out[-1] = CallDelta(index, before + text)
            case _:
                out.append(part)
    return out


class ResponseStream:
    """The parts of one answer while the engine generates it."""

    def __init__(
        self,
        reader: Reader | None,
        *,
        allow_parallel_calls: bool = True,
        demanded: Sequence[str] = (),
        warnings: tuple[str, ...] = (),
    ) -> None:
        """`reader` splits the text; None if all of it is the answer. Without `allow_parallel_calls`, every tool call
        after the first is dropped. `demanded`: names of the tools of which the answer must call one; text of such an
        answer is the beginning of a call that was cut, and is dropped.
        """
        self._warnings = warnings
        self._reader = reader
        self._allow_parallel_calls = allow_parallel_calls
        self._demanded = demanded
        self._dropped = ""
        self._call: CallStart | None = None  # the latest
        self._is_cut = False  # the latest call
        self._has_started = False
        self._clock = ReadingClock(perf_counter())

    def parts(self, event: Event) -> Iterator[Part]:
        if isinstance(event, PrefillProgress):
            if not self._has_started:
                self._has_started = True
                yield Started(event.total, event.reused)
            reading = self._clock.add(event, perf_counter())
            if event.done < event.total:
                yield reading
        elif isinstance(event, PromptScores | Scored):
            yield event
        elif isinstance(event, Piece):
            if event.channel == "reasoning":
                yield ReasoningDelta(event.text)
            elif self._reader is None:
                yield TextDelta(event.text)
            else:
                yield from self._split(self._reader.push(event.text))
        elif isinstance(event, Finished):
            if self._reader is not None:
                yield from self._split(self._reader.finish())
            if self._dropped and self._call is None and len(self._demanded) == 1:
                yield from self._split(
                    [CallStart(0, self._demanded[0]), CallEnd(0, ToolCall(self._demanded[0], ""), True)]
                )
            if not self._has_started:  # cancelled before prefill
                yield Started(event.metrics.prompt_tokens, event.metrics.cached_tokens)
            is_stopped_inside = self._is_cut and event.stop is not None
            ending: Ending = "stop" if self._call is None or is_stopped_inside else "tool_calls"
            if event.reason != "stop":
                ending = "repetition" if event.reason == "repetition" else "length"
            warnings = (*self._warnings, *event.warnings)
            yield Done(ending, event.stop, event.metrics, warnings, loss=event.loss)

    def _split(self, found: Iterable[AnswerPart | Thought]) -> Iterator[Part]:
        for each in found:
            if isinstance(each, Thought):
                yield ReasoningDelta(each.text)
            elif isinstance(each, str):
                if self._demanded:
                    self._dropped += each
                else:
                    yield TextDelta(each)
            elif self._allow_parallel_calls or each.index == 0:
                if isinstance(each, CallStart):
                    self._call = each
                elif isinstance(each, CallEnd):
                    self._is_cut = each.is_cut
                yield each
