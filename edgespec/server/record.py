"""The record of the request that is being answered: who sent it, what it cost, why it failed. It holds no text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic

from edgespec.engine.events import Finished
from edgespec.server.keys import Caller

_MAX_PATH = 200  # characters
_MAX_REASON = 300


@dataclass(slots=True)
class RequestRecord:
    """What the log says of a request.

    caller         who sent it
    status         that of the response; 0 before there is one
    failure        the status and the message of the error, which may follow the beginning of a stream
    model          its name; "" where the request names none
    prompt_tokens  read for it
    answers        generated for it, also after its client has left
    hops           the servers of edgespec that have passed it on, in order
    """

    method: str = ""
    path: str = ""
    caller: Caller = field(default_factory=Caller)
    status: int = 0
    failure: tuple[int, str] | None = None
    model: str = ""
    prompt_tokens: int = 0
    answers: list[Finished] = field(default_factory=list)
    began_s: float = field(default_factory=monotonic)
    on_end: Callable[[RequestRecord], None] | None = None
    parts: int = 0
    hops: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(each.metrics.emitted_tokens for each in self.answers)

    def add(self, answer: Finished) -> None:
        self.answers.append(answer)
        self.prompt_tokens += answer.metrics.prompt_tokens

    def begin(self) -> None:
        """A part begins: the response, or an answer, which the engine may end later than the response."""
        self.parts += 1

    def end(self) -> None:
        """A part has ended; `on_end` is called after the last one."""
        self.parts -= 1
        if not self.parts and self.on_end is not None:
            self.on_end(self)

    def format(self) -> str:
        """A line: method, path, status, seconds, and what is known besides as `name=value`."""
        head = f"{self.method} {self.path[:_MAX_PATH]} {self.status or '-'} {monotonic() - self.began_s:.3f}s"
        return " ".join([head, *(f"{name}={value}" for name, value in self._fields())])

    def _fields(self) -> Iterator[tuple[str, str | int]]:
        if self.caller.name:
            yield "key", self.caller.name
        if self.model:
            yield "model", json.dumps(self.model) if " " in self.model else self.model
        if self.prompt_tokens:
            yield "prompt_tokens", self.prompt_tokens
        if self.answers:
            yield "tokens", self.tokens
            yield "end", ",".join(dict.fromkeys(each.reason for each in self.answers))
        if len(self.answers) == 1:
            metrics = self.answers[0].metrics
            if metrics.tokens_per_second is not None:
                yield "tokens_per_second", f"{metrics.tokens_per_second:.1f}"
            if metrics.acceptance_rate is not None:
                yield "accepted", f"{metrics.acceptance_rate:.0%}"
        if self.failure is not None:
            yield "error", json.dumps(self.failure[1][:_MAX_REASON])  # on one line, whatever is in it


RECORD: ContextVar[RequestRecord] = ContextVar("record")


def current_record() -> RequestRecord:
    """The record of the request in whose context this runs; a new one outside of requests."""
    return RECORD.get(None) or RequestRecord()
