"""HTTP bodies, server-sent events, and errors in the format of the interface that was called."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

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
from edgespec.server.access_log import CLIENT_CLOSED
from edgespec.server.bodies import compute, parse_body
from edgespec.server.error_bodies import format_error
from edgespec.server.policy import Busy, TimedOut
from edgespec.server.record import current_record

B = TypeVar("B", bound=BaseModel)

_LOG = logging.getLogger("edgespec.server")
_SILENCE_S = 2.5  # a stream that was silent twice as long has had a comment
_BODY_TIMEOUT_S = 60.0
_FAREWELL_S = 2.0  # for a client to take the last event when the server stops
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's older interfaces."""
_STATUS: list[tuple[type[EdgespecError], int]] = [
    (Busy, 429),
    (InvalidRequest, 400),
    (TemplateError, 400),
    (UnknownModel, 404),
    (HubError, 503),
    (CacheError, 503),
    (DoesNotFit, 503),
    (TimedOut, 504),
]


class HttpError(EdgespecError):
    """An error with an HTTP status of its own. `log_message` is what the log says of it."""

    def __init__(self, status: int, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.log_message = message


class ServerStops(HttpError):
    """The server stops before the request has been answered."""

    def __init__(self) -> None:
        super().__init__(503, "the server is shutting down.", hint="Try again later.")


async def read_body(request: Request, kind: type[B]) -> B:
    """The validated body of a request. Raises InvalidRequest, HttpError."""
    content_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    is_curl = content_type == "application/x-www-form-urlencoded"  # its default, in Ollama's examples
    if content_type != "application/json" and not (is_curl and request.url.path.startswith("/api/")):
        raise HttpError(415, f"the content type is {content_type[:100]}.", hint="Send application/json.")
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            data = await request.body()
    except TimeoutError as error:
        message = f"the body did not arrive within {_BODY_TIMEOUT_S:.0f} seconds."
        raise HttpError(408, message, hint="Send it again.") from error
    except ClientDisconnect as error:
        raise HttpError(CLIENT_CLOSED, "the client left.", hint="Send the whole body.") from error
    return await compute(len(data), lambda: parse_body(data, kind))


def get_status(error: EdgespecError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, HttpError):
        return error.status
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def _note_failure(error: EdgespecError) -> int:
    """Keep an error for the log; returns its HTTP status."""
    status = get_status(error)
    current_record().failure = status, error.log_message if isinstance(error, HttpError) else error.message
    return status


def hide_internal_error(error: BaseException) -> EdgespecError:
    """`error` if clients may see it. Any other is a bug: it is logged, and clients see no details."""
    if isinstance(error, EdgespecError):
        return error
    _LOG.error("internal error: %s", reason_of(error), exc_info=error)
    return HttpError(500, "internal error.", hint="The server's log has the details; please report it.")


def dump_json(content: Any) -> bytes:
    """JSON whose strings may hold lone surrogates: models write them in the arguments of tool calls."""
    return _JSON.encode(content).encode("utf-8", "replace")


class JsonResponse(JSONResponse):
    def render(self, content: Any) -> bytes:
        return dump_json(content)


def error_response(path: str, error: EdgespecError) -> JsonResponse:
    """The response to a request at `path` that failed."""
    status = _note_failure(error)
    headers = {"retry-after": str(error.retry_after_s)} if isinstance(error, Busy) else None
    if status == 401:
        headers = {"www-authenticate": "Bearer"}
    return JsonResponse(format_error(path, status, error), status, headers)


async def respond_unless_disconnected(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    """A response with the body that `work` returns. `work` is cancelled when the client disconnects."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return JsonResponse(await task)
        _note_that_the_client_left()
        return Response(status_code=CLIENT_CLOSED)
    finally:
        watch.cancel()
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


def _note_that_the_client_left() -> None:
    current_record().failure = CLIENT_CLOSED, "the client left."


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. Comments keep the connection open through silences; a disconnect cancels the work.

    `events` yields whole events. The headers wait for the first event or a few seconds, so an error before that is
    answered with its own status. Cancelled, as by the end of the server, the stream ends with an error event.
    """

    content_type = b"text/event-stream; charset=utf-8"
    keep_alive = b": keep-alive\n\n"

    def __init__(self, path: str, events: AsyncGenerator[bytes, None], fail: Callable[[dict[str, Any]], bytes]) -> None:
        """`fail` formats the body of an error as the last events."""
        self.status_code = 200
        self.background = None
        self._path = path
        self._events = events
        self._fail = fail
        self._sending = asyncio.Lock()
        self._has_begun = self._is_silent = self._is_stopped = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(scope, receive, send))
        watch = asyncio.create_task(_wait_for_disconnect(receive))
        ends = {sending, watch}
        try:
            while not (await asyncio.wait(ends, timeout=_SILENCE_S, return_when=asyncio.FIRST_COMPLETED))[0]:
                if not self._is_silent:
                    self._is_silent = True  # until something is sent
                elif not self._sending.locked():
                    await self._send(send, self.keep_alive)
            if sending.done():
                sending.result()
            else:
                _note_that_the_client_left()
        except asyncio.CancelledError:
            self._is_stopped = True
            sending.cancel()
            await asyncio.wait(ends, timeout=_FAREWELL_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            sending.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await sending
            await self._events.aclose()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: EdgespecError | None = None
        try:
            async for event in self._events:
                await self._send(send, event)
        except asyncio.CancelledError:
            if not self._is_stopped:
                raise
            failure = ServerStops()
        except Exception as error:  # noqa: BLE001 - a bug is logged, and the stream says so
            failure = hide_internal_error(error)
        if failure is None:
            await self._send(send, b"", more=False)
            return
        async with self._sending:  # a comment that is being sent has begun the response
            if not self._has_begun:
                await error_response(self._path, failure)(scope, receive, send)
                return
        error_body = format_error(self._path, _note_failure(failure), failure)  # the status is sent: it is an event
        await self._send(send, self._fail(error_body), more=False)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        async with self._sending:
            if not self._has_begun:
                headers = [
                    (b"content-type", self.content_type),
                    (b"cache-control", b"no-store"),
                    (b"x-accel-buffering", b"no"),
                ]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                self._has_begun = True
            await send({"type": "http.response.body", "body": data, "more_body": more})
            self._is_silent = False


def format_event(data: dict[str, Any]) -> bytes:
    """One server-sent event. It is named after the `type` of `data`, if there is one."""
    head = f"event: {data['type']}\n" if "type" in data else ""
    return f"{head}data: ".encode() + dump_json(data) + b"\n\n"
