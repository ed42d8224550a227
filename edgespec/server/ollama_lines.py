"""The answers of Ollama's interface: JSON objects, one a line, with times in nanoseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Literal

from edgespec.server.arguments import read_arguments
from edgespec.server.http import EventStream, dump_json
from edgespec.service.response import Done, Part, ReasoningDelta, TextDelta, new_id
from edgespec.text.tool_formats import CallEnd

Answer = Callable[[str, str, list[dict[str, Any]]], dict[str, Any]]
"""Formats text, reasoning and tool calls as the fields of a line."""


class LineWriter:
    """One answer, as a body or as lines. Calls are whole; one that was cut is left out, since no field would say so."""

    def __init__(self, model: str, answer: Answer) -> None:
        self._model = model
        self._answer = answer
        self._began_s = monotonic()
        self._text = ""
        self._reasoning = ""
        self._calls: list[dict[str, Any]] = []
        self._end: Done

    def add(self, index: int, part: Part) -> None:
        if isinstance(part, TextDelta):
            self._text += part.text
        elif isinstance(part, ReasoningDelta):
            self._reasoning += part.text
        elif isinstance(part, CallEnd) and not part.is_cut:
            self._calls.append(_format_call(part))
        elif isinstance(part, Done):
            self._end = part

    def response_body(self) -> dict[str, Any]:
        return self._line(self._text, self._reasoning, self._calls, **self._finish(self._end))

    def load_body(self, reason: Literal["load", "unload"]) -> dict[str, Any]:
        """The answer to a request without a prompt, which has loaded or unloaded the model."""
        return self._line(done=True, done_reason=reason)

    def chunks(self, index: int, part: Part) -> Iterator[bytes]:
        if isinstance(part, TextDelta):
            yield format_line(self._line(part.text))
        elif isinstance(part, ReasoningDelta):
            yield format_line(self._line(reasoning=part.text))
        elif isinstance(part, CallEnd) and not part.is_cut:
            yield format_line(self._line(calls=[_format_call(part)]))
        elif isinstance(part, Done):
            yield format_line(self._line(**self._finish(part)))

    def finish(self) -> Iterator[bytes]:
        yield from ()

    def fail(self, error: dict[str, Any]) -> bytes:
        return format_line(error)

    def _line(
        self,
        text: str = "",
        reasoning: str = "",
        calls: list[dict[str, Any]] | None = None,
        *,
        done: bool = False,
        **more: Any,
    ) -> dict[str, Any]:
        head = {"model": self._model, "created_at": format_time(datetime.now(UTC))}
        return {**head, **self._answer(text, reasoning, calls or []), "done": done, **more}

    def _finish(self, end: Done) -> dict[str, Any]:
        """The last line's fields. What is neither reading nor writing counts as loading, such as waiting."""
        total_s, metrics = monotonic() - self._began_s, end.metrics
        written_s = (metrics.ttft_s or metrics.prefill_s) - metrics.prefill_s
        written_s += (metrics.tpot_s or 0.0) * max(0, metrics.emitted_tokens - 1)
        return {
            "done": True,
            "done_reason": "length" if end.reason == "length" else "stop",
            "total_duration": round(total_s * 1e9),
            "load_duration": round(max(0.0, total_s - metrics.prefill_s - written_s) * 1e9),
            "prompt_eval_count": metrics.prompt_tokens,
            "prompt_eval_duration": round(metrics.prefill_s * 1e9),
            "eval_count": metrics.emitted_tokens,
            "eval_duration": round(written_s * 1e9),
            **end.extensions(),
        }


class LineStream(EventStream):
    """JSON objects, one a line. Nothing is sent in silences: every line must be an object."""

    content_type = b"application/x-ndjson"
    keep_alive = b""


def format_message(text: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    thinking = {"thinking": reasoning} if reasoning else {}
    return {"message": {"role": "assistant", "content": text, **thinking, **({"tool_calls": calls} if calls else {})}}


def format_response(text: str, reasoning: str, _calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"response": text, **({"thinking": reasoning} if reasoning else {})}


def format_raw(text: str, reasoning: str, _calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Raw text is not split."""
    return {"response": reasoning + text}


def _format_call(part: CallEnd) -> dict[str, Any]:
    function = {"index": part.index, "name": part.call.name, "arguments": read_arguments(part.call.arguments)}
    return {"id": new_id("call_"), "function": function}


def format_line(data: dict[str, Any]) -> bytes:
    """One line of a stream."""
    return dump_json(data) + b"\n"


def format_time(moment: datetime) -> str:
    """RFC 3339, in UTC."""
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
