"""The writer that /v1/chat/completions and /v1/completions share: one entry of `choices` for each answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from edgespec import __version__
from edgespec.engine.events import Scored
from edgespec.server.fields import CompletionBody
from edgespec.server.http import DONE, format_event
from edgespec.service.response import Done, count_usage

_FINGERPRINT = f"edgespec-{__version__}"
_MIN_LOGPROB = -9999.0  # OpenAI's value for -inf, which JSON cannot hold


class ChoicesWriter:
    """The answers to one request, as a body or as chunks. Subclasses gather the content of each choice."""

    def __init__(self, request: CompletionBody, head: dict[str, Any], chunk_object: str) -> None:
        """`head`: the first fields of the body. `chunk_object`: the value of `object` in chunks."""
        self._wants_usage = request.wants_usage
        self._head = {
            **head,
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": _FINGERPRINT,
        }
        self._chunk_object = chunk_object
        self._copies = request.n or 1
        self._scores: dict[int, list[dict[str, Any]]] = {}  # logprobs of a choice, one entry per token
        self._ends: dict[int, Done] = {}

    def finish(self) -> Iterator[bytes]:
        """The last chunks: usage if the client asked for it, then the end of the stream."""
        if self._wants_usage:
            yield self._chunk([], usage=count_usage(self._ordered_ends(), self._copies))
        yield DONE

    def fail(self, error: dict[str, Any]) -> bytes:
        return format_event(error)

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        ends = self._ordered_ends()
        return {**self._head, "choices": choices, "usage": count_usage(ends, self._copies), **ends[0].extensions()}

    def _ordered_ends(self) -> list[Done]:
        """The ends of the answers by index: they end in any order."""
        return [end for _, end in sorted(self._ends.items())]

    def _chunk(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        return format_event({**self._head, "object": self._chunk_object, "choices": choices, **extra})


def make_choice(
    index: int, content: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One entry of `choices`."""
    return {"index": index, **content, "finish_reason": reason, "logprobs": logprobs}


def format_score(score: Scored) -> dict[str, Any]:
    """The logprobs of one token in the form of /v1/chat/completions."""
    top = [_format_token(text, logprob) for text, logprob in score.top]
    return {**_format_token(score.text, score.logprob), "top_logprobs": top}


def _format_token(text: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text.decode("utf-8", "replace"), "logprob": max(logprob, _MIN_LOGPROB), "bytes": list(text)}
