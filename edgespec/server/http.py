"""Bodies in, bodies and event streams out, and errors in the shape of whichever interface was called."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from edgespec.engine.structured_output import is_shallow
from edgespec.errors import (
    CacheError,
    DoesNotFit,
    EdgespecError,
    HubError,
    InvalidRequest,
    TemplateError,
    UnknownModel,
    reason_of,
)
from edgespec.server.models import Busy

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)

_LOG = logging.getLogger("edgespec.server")
KEEP_ALIVE_S = 5.0
_DEEPEST = 128
_BODY_S = 60.0
DONE = b"data: [DONE]\n\n"


class HttpError(EdgespecError):
    """A refusal with a status of its own."""

    def __init__(self, status: int, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.status = status


async def body_of(request: Request, kind: type[B]) -> B:
    """The checked body. Raises InvalidRequest, HttpError."""
    kind_given = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind_given != "application/json":
        raise HttpError(415, f"the body is {kind_given[:100]}.", hint="Send application/json.")
    try:
        async with asyncio.timeout(_BODY_S):
            data = await request.body()
    except TimeoutError as error:
        raise HttpError(408, f"the body did not arrive within {_BODY_S:.0f} seconds.", hint="Send it again.") from error
    try:
        given = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("the body is no JSON.", hint="Check it.") from error
    if not is_shallow(given, _DEEPEST):
        raise InvalidRequest(f"the body is nested more than {_DEEPEST} deep.", hint="Simplify it.")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise InvalidRequest(_told(error), hint="Check the body.") from error


def _told(error: ValidationError) -> str:
    """The first thing that is wrong with a body, without what was in it."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:200]
    return f"{where or 'the body'}: {first['msg'][:300].rstrip('.')}."


def status_of(error: EdgespecError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, HttpError):
        return error.status
    for kinds, status in (
        (Busy, 429),
        ((InvalidRequest, TemplateError), 400),
        (UnknownModel, 404),
        ((HubError, CacheError, DoesNotFit), 503),
    ):
        if isinstance(error, kinds):
            return status
    return 500


def openai_error(error: EdgespecError) -> dict[str, Any]:
    status = status_of(error)
    kind = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
            404: "invalid_request_error", 413: "invalid_request_error", 415: "invalid_request_error",
            429: "rate_limit_error"}.get(status, "server_error")  # fmt: skip
    code = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}.get(status)
    return {"error": {"message": f"{error.message} {error.hint}", "type": kind, "param": None, "code": code}}


def anthropic_error(error: EdgespecError) -> dict[str, Any]:
    kind = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
            413: "request_too_large", 415: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error",
            }.get(status_of(error), "api_error")  # fmt: skip
    return {"type": "error", "error": {"type": kind, "message": f"{error.message} {error.hint}"}}


def shape_for(path: str) -> Callable[[EdgespecError], dict[str, Any]]:
    """How errors are written below `path`."""
    return anthropic_error if path.startswith("/v1/messages") else openai_error


def expected(error: BaseException) -> EdgespecError:
    """An error as it may be told; a bug of ours is logged and told of without its words."""
    if isinstance(error, EdgespecError):
        return error
    _LOG.error("internal error: %s", reason_of(error), exc_info=error)
    return HttpError(500, "internal error.", hint="The server's log has the details; please report it.")


class JsonResponse(JSONResponse):
    """JSON whose texts may hold halves of surrogate pairs, as a model writes them in arguments of calls."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def error_response(path: str, error: EdgespecError) -> JsonResponse:
    headers = {"retry-after": str(error.retry_after_s)} if isinstance(error, Busy) else None
    if status_of(error) == 401:
        headers = {"www-authenticate": "Bearer"}
    return JsonResponse(shape_for(path)(error), status_of(error), headers)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; it is cancelled as soon as the client has gone, to whom there is nothing to say."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        watch.cancel()
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. What is not ready for some seconds is bridged by comments; who goes ends the work at once.

    `events` yields whole lines of events. An error before the first is answered with its status, as the headers wait
    that long.
    """

    def __init__(self, path: str, events: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self._path = path
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(scope, receive, send))
        watch = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({sending, watch}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            watch.cancel()
            sending.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await sending
            await self._events.aclose()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        next_ = asyncio.ensure_future(anext(self._events, None))
        try:
            await asyncio.wait({next_}, timeout=KEEP_ALIVE_S)
            if next_.done() and (error := next_.exception()) is not None:
                await error_response(self._path, expected(error))(scope, receive, send)
                return
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"),
                       (b"x-accel-buffering", b"no")]  # fmt: skip
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while True:
                done, _ = await asyncio.wait({next_}, timeout=KEEP_ALIVE_S)  # wait_for may swallow a cancellation
                if not done:
                    await send({"type": "http.response.body", "body": b": still here\n\n", "more_body": True})
                    continue
                try:
                    event = next_.result()
                except Exception as error:  # noqa: BLE001 - told within the stream, as the headers are gone
                    event, told = None, shape_for(self._path)(expected(error))
                    name = "error" if "type" in told else None
                    await send({"type": "http.response.body", "body": event_of(told, name), "more_body": True})
                if event is None:
                    break
                await send({"type": "http.response.body", "body": event, "more_body": True})
                next_ = asyncio.ensure_future(anext(self._events, None))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            next_.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await next_


def event_of(data: dict[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode("utf-8", "replace")
