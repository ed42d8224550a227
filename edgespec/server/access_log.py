"""AccessLog: ASGI middleware that writes a line for each request and counts requests and tokens by key."""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.server.record import RECORD, RequestRecord

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
_POLLED = frozenset({"/health", "/metrics", "/props"})
_LOG = logging.getLogger("edgespec.server")


class AccessLog:
    """Writes a line when the response and all answers of a request have ended. Keys are known by their names."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._requests = Counter(
            "requests", "Responses by key and status.", ["key", "status"], namespace="edgespec", registry=registry
        )
        self._tokens = Counter(
            "key_tokens", "Tokens by key, read and written.", ["key", "kind"], namespace="edgespec", registry=registry
        )
        self._failures = Counter(
            "failures",
            "Requests that failed, also amid a stream.",
            ["model", "kind"],
            namespace="edgespec",
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["raw_path"].decode("ascii", "backslashreplace")
        record = RequestRecord(scope["method"], path, on_end=self._write)

        async def note_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        RECORD.set(record)
        record.begin()
        try:
            await self._app(scope, receive, note_status)
        finally:
            record.end()

    def _write(self, record: RequestRecord) -> None:
        key = record.caller.name
        self._requests.labels(key, str(record.status)).inc()
        self._tokens.labels(key, "prompt").inc(record.prompt_tokens)
        self._tokens.labels(key, "generated").inc(record.tokens)
        if record.failure is not None:
            status, _ = record.failure
            kind = _KINDS.get(status, "invalid" if status < 500 else "error")
            self._failures.labels(record.model, kind).inc()
        _LOG.log(_get_level(record), "%s", record.format())


def _get_level(record: RequestRecord) -> int:
    status = record.failure[0] if record.failure is not None else record.status
    if record.path in _POLLED and status in (200, 503):  # 503 says that a model loads, or that one has stalled
        return logging.DEBUG
    if status >= 500:
        return logging.ERROR
    if status >= 400 and status != CLIENT_CLOSED:
        return logging.WARNING
    return logging.INFO
