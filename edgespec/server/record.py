"""The record of the request that is being answered: who sent it, what it cost, why it failed. It holds no text."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.engine.events import Finished, MemoryUse

ONLY_KEY = "api-key"
"""The name of the key of `--api-key`."""

_NAMESPACE = "key:"
_STRANGERS = "strangers"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request.

    name        name of the caller's key; "" without a key
    may_manage  whether the caller may load and unload models, or may generate only
    remembers   whether the memory keeps the caller's texts and drafts from them
    """

    name: str = ""
    may_manage: bool = False
    remembers: bool = False

    @property
    def owner(self) -> str:
        """The namespace of the caller's texts, even if none are kept. All strangers on other machines share one."""
        return name_namespace(self.name) if self.name or self.may_manage or self.remembers else _STRANGERS

    @property
    def memory(self) -> MemoryUse | None:
        """What the caller's generations use of the memory: texts of its own key alone. None: nothing."""
        return MemoryUse(name_namespace(self.name)) if self.remembers else None


def name_namespace(name: str) -> str:
    """The namespace of a key in the memory, by the key's name; without a key it is the user's own."""
    return f"{_NAMESPACE}{name}" if name else ""


def read_namespace(namespace: str) -> str:
    """The name of the key with this namespace; "" for the user's own."""
    return namespace.removeprefix(_NAMESPACE)


def hash_key(key: str) -> bytes:
    """SHA-256 of a key.

    Slow hashes with salt protect passwords, which can be guessed. A random key of 256 bits cannot be guessed, so a slow
    hash would not make it safer, and would slow down every request.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


_MAX_PATH = 200  # characters
_MAX_REASON = 300


@dataclass(slots=True)
class RequestContext:
    """What the log says of a request.

    caller         who sent it
    status         HTTP status of the response; 0 before there is one
    failure        the status and the message of the error, which may follow the beginning of a stream
    model          its name; "" if the request names none
    prompt_tokens  read for it
    answers        generated for it, also after its client has left
    servers        names of the edgespec servers that have passed it on, in order
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
    servers: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(each.metrics.emitted_tokens for each in self.answers)

    def add(self, answer: Finished) -> None:
        self.answers.append(answer)
        self.prompt_tokens += answer.metrics.prompt_tokens

    def format(self) -> str:
        """A line: method, path, status, seconds, and what is known besides as `name=value`."""
        fields: dict[str, Any] = {"key": self.caller.name}
        fields["model"] = json.dumps(self.model) if " " in self.model else self.model
        fields["prompt_tokens"] = self.prompt_tokens or None
        if self.answers:
            fields |= {"tokens": self.tokens, "end": ",".join(dict.fromkeys(each.reason for each in self.answers))}
        if len(self.answers) == 1:
            metrics = self.answers[0].metrics
            fields["tokens_per_second"] = metrics.tokens_per_second and f"{metrics.tokens_per_second:.1f}"
            fields["accepted"] = None if metrics.acceptance_rate is None else f"{metrics.acceptance_rate:.0%}"
            fields["cached"] = metrics.cached_tokens or None
            if (loss := self.answers[0].loss) is not None:
                fields["read_again"] = json.dumps(loss.reason)
        if self.failure is not None:
            fields["error"] = json.dumps(self.failure[1][:_MAX_REASON])  # on one line, whatever is in it
        head = f"{self.method} {self.path[:_MAX_PATH]} {self.status or '-'} {monotonic() - self.began_s:.3f}s"
        return " ".join([head, *(f"{name}={value}" for name, value in fields.items() if value not in (None, ""))])


_CONTEXT: ContextVar[RequestContext] = ContextVar("request")


def request_context() -> RequestContext:
    """The record of the request in whose context this runs; a new one outside of requests."""
    return _CONTEXT.get(None) or RequestContext()


CLIENT_CLOSED = 499  # nginx's status; no client reads it
_KINDS = {  # of failures, by status; others are of kind 'invalid' below 500 and 'error' from there
    401: "no_key",
    403: "forbidden",
    404: "not_found",
    429: "busy",
    CLIENT_CLOSED: "client_left",
    502: "other_server",
    503: "unavailable",
    504: "timeout",
}
_POLLED = frozenset({"/health", "/metrics", "/props", "/slots"})
_LOG = logging.getLogger("edgespec.server")


class AccessLog:
    """Writes a line when the response and all answers of a request have ended. Keys are known by their names."""

    def __init__(self, app: ASGIApp, count: Callable[[RequestContext, str], None]) -> None:
        """`count` gets every request that has ended, and the kind of its failure, "" if it has not failed."""
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["raw_path"].decode("ascii", "backslashreplace")
        context = RequestContext(scope["method"], path)

        async def note_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
            await send(message)

        _CONTEXT.set(context)
        try:
            await self._app(scope, receive, note_status)
        finally:
            status = context.failure[0] if context.failure is not None else context.status
            kind = "" if context.failure is None else _KINDS.get(status, "invalid" if status < 500 else "error")
            self._count(context, kind)
            _LOG.log(_get_level(context.path, status), "%s", context.format())


def _get_level(path: str, status: int) -> int:
    if path in _POLLED and status in (200, 503):  # 503 says that a model loads, or that one has stalled
        return logging.DEBUG
    if status >= 500:
        return logging.ERROR
    return logging.WARNING if status >= 400 and status != CLIENT_CLOSED else logging.INFO
