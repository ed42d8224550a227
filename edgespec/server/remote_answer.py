"""RemoteAnswer: the events of another server's stream as parts of an answer, and what it reports of usage and speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from time import monotonic
from typing import Any

from edgespec.core.metrics import Metrics
from edgespec.core.protocols import FinishReason
from edgespec.engine.events import Finished, Scored
from edgespec.service.response import Done, Ending, Part, ReasoningDelta, Started, TextDelta
from edgespec.text.tool_formats import CallDelta, CallEnd, CallStart, ToolCall

_ENDINGS: dict[str, Ending] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}
_LARGE = 10**12
_REPORTED = {"usage": dict, "timings": dict, "warnings": list}


class RemoteAnswer:
    """One answer as it arrives. `parts` takes each event of the stream, `finish` follows the last."""

    def __init__(self, warnings: tuple[str, ...]) -> None:
        """`warnings`: what of the request is not followed, in sentences."""
        self._warnings = warnings
        self._began_s = monotonic()
        self._first_s: float | None = None  # when the first and the last text came
        self._last_s = 0.0
        self._n_events = 0  # with text
        self._call: CallStart | None = None  # the one that is open
        self._arguments = ""
        self._call_key: object = None
        self._n_calls = 0
        self._reason: str | None = None
        self._stop: str | None = None
        self._reported: dict[str, Any] = {}

    @property
    def has_text(self) -> bool:
        """Whether anything of the answer has arrived."""
        return self._first_s is not None

    @property
    def is_whole(self) -> bool:
        """Whether the server has said why the answer ended."""
        return self._reason is not None

    def parts(self, event: Mapping[str, Any]) -> Iterator[Part]:
        """The parts in an event of /v1/chat/completions or /v1/completions, or in a whole answer."""
        for name, kind in _REPORTED.items():
            if isinstance(event.get(name), kind) and event[name]:
                self._reported[name] = event[name]
        for choice in event.get("choices") or ():
            found = list(self._read_choice(choice))
            if found:
                self._last_s = monotonic()
                if self._first_s is None:
                    self._first_s = self._last_s
                    yield Started(0, 0)  # the counts come with the end
                self._n_events += 1
                yield from found

    def cut(self) -> None:
        """The time of the answer is over."""
        self._reason = "length"

    def finish(self) -> Iterator[Part]:
        """The last parts."""
        reason: Ending = _ENDINGS.get(self._reason or "", "stop")
        if reason == "stop" and self._n_calls:
            reason = "tool_calls"  # which some servers call a stop
        yield from self._end_call(is_cut=reason == "length")
        if not self.has_text:
            yield Started(0, 0)
        metrics = self._measure()
        noted = (*self._warnings, *(str(each) for each in self._reported.get("warnings", ())))
        if "usage" not in self._reported:
            noted = (*noted, "the other server reports no usage: the tokens are the events of its stream.")
        yield Done(reason, self._stop, metrics, None, noted, self._format_timings(metrics))

    def summarize(self) -> Finished:
        """What is counted of the answer, also of one that was left or that failed."""
        reason: FinishReason = "cancelled" if self._reason is None else "length" if self._reason == "length" else "stop"
        return Finished(reason, (), 0, self._measure(), self._stop)

    def _read_choice(self, choice: Mapping[str, Any]) -> Iterator[Part]:
        delta = choice.get("delta") or choice.get("message") or {}
        yield from _read_scores(choice.get("logprobs") or {})
        if text := delta.get("reasoning_content") or delta.get("reasoning"):
            yield ReasoningDelta(str(text))
        if text := delta.get("content") or delta.get("refusal") or choice.get("text"):
            yield from self._end_call()
            yield TextDelta(str(text))
        if isinstance(called := delta.get("function_call"), dict):  # of OpenAI's first form of tools
            yield from self._read_call("function", called)
        for number, call in enumerate(delta.get("tool_calls") or ()):
            yield from self._read_call(call.get("index", number), call.get("function") or {})
        if reason := choice.get("finish_reason"):
            self._reason = str(reason)
            stop = choice.get("stop_reason")  # vLLM's: the stop string
            self._stop = stop if isinstance(stop, str) else None

    def _read_call(self, key: object, function: Mapping[str, Any]) -> Iterator[Part]:
        """A part of the call with this key."""
        if self._call is None or key != self._call_key:
            yield from self._end_call()
            self._call, self._call_key = CallStart(self._n_calls, str(function.get("name") or "")), key
            self._n_calls += 1
            yield self._call
        if arguments := function.get("arguments"):
            self._arguments += str(arguments)
            yield CallDelta(self._call.index, str(arguments))

    def _end_call(self, *, is_cut: bool = False) -> Iterator[Part]:
        if self._call is not None:
            yield CallEnd(self._call.index, ToolCall(self._call.name, self._arguments), is_cut)
            self._call, self._arguments = None, ""

    def _measure(self) -> Metrics:
        """Counts as they were reported; times as they were, else as the answer arrived here."""
        usage, timings = self._reported.get("usage", {}), self._reported.get("timings", {})
        emitted = _count(usage, "completion_tokens", self._n_events)
        drafted, accepted = _count(timings, "draft_n"), _count(timings, "draft_n_accepted")
        tau = _number(timings, "tau")
        forwards = round((emitted - 1) / tau) if tau and emitted else max(0, emitted - 1 - accepted) if drafted else 0
        speed = _number(timings, "predicted_per_second")
        arrived_s = self._last_s - (self._first_s or 0.0)
        tpot_s = 1 / speed if speed else arrived_s / (emitted - 1) if emitted > 1 and arrived_s else None
        ttft_s = self._first_s - self._began_s if self._first_s is not None else None
        prompt_ms = _number(timings, "prompt_ms")
        return Metrics(
            prompt_tokens=_count(usage, "prompt_tokens"),
            emitted_tokens=emitted,
            target_forwards=forwards,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
            tau=tau or ((emitted - 1) / forwards if forwards else None),
            acceptance_rate=accepted / drafted if drafted else None,
            alpha_by_depth=(),
            tokens_per_second=1 / tpot_s if tpot_s else None,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            step_p50_s=None,
            step_p99_s=None,
            prefill_s=min(ttft_s or 0.0, float("inf") if prompt_ms is None else prompt_ms / 1000),
            draft_s=0.0,
            verify_s=0.0,
            sample_s=0.0,
            commit_s=0.0,
            times_plain=_number(timings, "times_plain"),
            cached_tokens=_count(usage.get("prompt_tokens_details"), "cached_tokens", _count(timings, "cache_n")),
            reasoning_tokens=_count(usage.get("completion_tokens_details"), "reasoning_tokens"),
        )

    def _format_timings(self, metrics: Metrics) -> dict[str, Any]:
        """The timings that were reported; without them, the speed at which the answer arrived."""
        if reported := self._reported.get("timings"):
            return dict(reported)
        speed = {} if metrics.tokens_per_second is None else {"predicted_per_second": metrics.tokens_per_second}
        return {"prompt_n": metrics.prompt_tokens, "predicted_n": metrics.emitted_tokens, **speed}


def _read_scores(logprobs: Mapping[str, Any]) -> Iterator[Scored]:
    """The scored tokens of a choice, in the form of the chat or of the completions."""
    for each in logprobs.get("content") or ():
        top = tuple((_spell(other), float(other["logprob"])) for other in each.get("top_logprobs") or ())
        yield Scored(_spell(each), float(each["logprob"]), top)
    tops = logprobs.get("top_logprobs") or ()
    pairs = zip(logprobs.get("tokens") or (), logprobs.get("token_logprobs") or (), strict=False)
    for number, (token, logprob) in enumerate(pairs):
        ranked = tops[number] if number < len(tops) and tops[number] else {}
        yield Scored(token.encode(), float(logprob or 0.0), tuple((text.encode(), by) for text, by in ranked.items()))


def _spell(token: Mapping[str, Any]) -> bytes:
    given = token.get("bytes")
    return bytes(given) if isinstance(given, list) else str(token["token"]).encode()


def _count(values: Any, name: str, default: int = 0) -> int:
    value = values.get(name) if isinstance(values, dict) else None
    return value if isinstance(value, int) and 0 <= value < _LARGE else default


def _number(values: Any, name: str) -> float | None:
    """A time, a rate or tau; None where it is none that can be."""
    value = values.get(name) if isinstance(values, dict) else None
    return float(value) if isinstance(value, int | float) and 1 / _LARGE < value < _LARGE else None
