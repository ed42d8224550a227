"""HTTP bodies, server-sent events, and errors in the format of the interface that was called."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from edgespec.client.process import MAX_SILENCE_S
from edgespec.errors import (
    CacheError,
    DoesNotFit,
    EdgespecError,
    HubError,
    InvalidRequest,
    PromptTooLong,
    TemplateError,
    UnknownModel,
    reason_of,
)
from edgespec.server.fields import parse_body
from edgespec.server.record import CLIENT_CLOSED, request_context

_OPENAI_ERRORS = {  # status -> type, code; others are an invalid_request_error below 500, and a server_error from there
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}
_FOLDERS = re.compile(r"(?<![\w.:/\\#])(?:~|[A-Za-z]:)?(?:[/\\][^/\\\s'\"`]+)+[/\\](?=[^/\\\s'\"`])")
"""Matches the folders in a path of this machine, which an error of the engine or the hub may hold. They are for the
log, not for callers.
"""

_ANTHROPIC_ERRORS = {  # status -> type; others are an invalid_request_error below 500, and an api_error from there
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def format_error(path: str, status: int, error: EdgespecError) -> dict[str, Any]:
    """The body of an error in the format of the interface at `path`."""
    is_anthropic = path.startswith("/v1/messages")
    message = _FOLDERS.sub("", error.text)
    is_invalid = status < 500
    kind, code = _OPENAI_ERRORS.get(status, ("invalid_request_error" if is_invalid else "server_error", None))
    more: dict[str, int] = {}
    if isinstance(error, UnknownModel):
        code = "model_not_found"
    elif isinstance(error, PromptTooLong):  # in the words by which clients know that they may shorten a conversation
        code, more = "context_length_exceeded", {"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_context}
        message = (
            f"prompt is too long: {error.n_prompt} tokens > {error.n_context} maximum"
            if is_anthropic
            else f"This model's maximum context length is {error.n_context} tokens. However, your prompt has "
            f"{error.n_prompt} tokens. Shorten it, or restart the server with a larger --ctx."
        )
    if path.startswith("/api/"):
        return {"error": message}
    if is_anthropic:
        kind = _ANTHROPIC_ERRORS.get(status, "invalid_request_error" if is_invalid else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "param": None, "code": code, **more}}


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits of a server.

    max_open       models in memory
    max_queue      requests that may wait for one model
    keep_alive_s   how long an idle model stays loaded; `inf`: until another one needs its memory
    timeout_s      how long a call may take, from its turn and the loading of its model on
    max_silence_s  how long the process of a model may give no sign of life
    remembers      whether the memory of another edgespec may keep the texts of this server's own user
    """

    max_open: int = 1
    max_queue: int = 64
    keep_alive_s: float = 300.0
    timeout_s: float = 600.0
    max_silence_s: float = MAX_SILENCE_S
    remembers: bool = True


B = TypeVar("B", bound=BaseModel)

_LOG = logging.getLogger("edgespec.server")
_SILENCE_S = 2.5  # a silent stream gets a comment after twice this time, and after each further one
_BODY_TIMEOUT_S = 60.0
_FAREWELL_S = 2.0  # for a client to take the last event when the server stops
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_STATUS: list[tuple[type[EdgespecError], int]] = [
    (InvalidRequest, 400),
    (TemplateError, 400),
    (UnknownModel, 404),
    (HubError, 503),
    (CacheError, 503),
    (DoesNotFit, 503),
]


class HttpError(EdgespecError):
    """An error with an HTTP status of its own.

    log_message    what the log says of it; None: its message
    retry_after_s  the estimated time until the same request would be served
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        hint: str = "",
        log_message: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.log_message = log_message or message
        self.retry_after_s = retry_after_s


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
        raise HttpError(408, message) from error
    except ClientDisconnect as error:
        raise HttpError(CLIENT_CLOSED, "the client left.") from error
    return parse_body(data, kind)


def _note_failure(error: EdgespecError) -> int:
    """Keep an error for the log; returns its HTTP status."""
    known = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    status, told = (error.status, error.log_message) if isinstance(error, HttpError) else (known, error.message)
    request_context().failure = status, told
    return status


def explain(error: BaseException) -> EdgespecError:
    """Return the error that a client is told. A cancellation means that the server shuts down. Any other exception that
    is not an EdgespecError is a bug: it is logged, and clients see no details.
    """
    if isinstance(error, asyncio.CancelledError):
        return HttpError(503, "the server is shutting down.")
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
    status = _note_failure(error)
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    if isinstance(error, HttpError) and error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    return JsonResponse(format_error(path, status, error), status, headers)


async def respond_unless_disconnected(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    """A response with the body that `work` returns. `work` is cancelled when the client disconnects."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return JsonResponse(await task) if task.done() else _client_left()
    finally:
        watch.cancel()
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


def _client_left() -> Response:
    """The response that nobody reads; the log says so."""
    request_context().failure = CLIENT_CLOSED, "the client left."
    return Response(status_code=CLIENT_CLOSED)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def format_event(data: dict[str, Any]) -> bytes:
    """One server-sent event. It is named after the `type` of `data`, if there is one."""
    head = f"event: {data['type']}\n" if "type" in data else ""
    return f"{head}data: ".encode() + dump_json(data) + b"\n\n"


class EventStream(Response):
    """Server-sent events. Comments keep the connection open through silences; a disconnect cancels the work.

    `events` yields whole events. The headers wait for the first event or a few seconds, and an error before that is
    raised. A later one, such as the end of the server, is the last event.
    """

    content_type = b"text/event-stream; charset=utf-8"
    format = staticmethod(format_event)
    comment = staticmethod(lambda text: f": {text}\n\n".encode())  # which every client ignores

    def __init__(self, path: str, events: AsyncGenerator[bytes, None], fail: Callable[[dict[str, Any]], bytes]) -> None:
        """`fail` formats the body of an error as the last events."""
        self._path = path
        self._events = events
        self._fail = fail
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await self._send_all(send, watch)
        except (Exception, asyncio.CancelledError) as error:
            if not self._has_begun:
                raise  # the guard answers it with its own status
            failure = explain(error)
            body = format_error(self._path, _note_failure(failure), failure)
            with suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL_S):
                    await self._send(send, self._fail(body), more=False)
        finally:
            watch.cancel()
            await self._events.aclose()

    async def _send_all(self, send: Send, watch: asyncio.Task[None]) -> None:
        """Send the events until they end, or until `watch` is done because the client has disconnected."""
        is_silent, reading = False, asyncio.create_task(anext(self._events, None))
        try:
            while not watch.done():
                await asyncio.wait({reading, watch}, timeout=_SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    if (event := reading.result()) is None:
                        await self._send(send, b"", more=False)
                        return
                    await self._send(send, event)
                    is_silent, reading = False, asyncio.create_task(anext(self._events, None))
                else:
                    if is_silent:
                        await self._send(send, self.comment("keep-alive"))
                    is_silent = True
            _client_left()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers = [
                (b"content-type", self.content_type),
                (b"cache-control", b"no-store"),
                (b"x-accel-buffering", b"no"),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data, "more_body": more})


class BodyRoute(Route):
    """A route whose handler gets a validated body."""

    def __init__(
        self,
        path: str,
        kind: type[B],
        handler: Callable[[Request, B], Awaitable[Response]],
        *,
        manages: bool = False,
    ) -> None:
        """`manages`: whether the caller must be one who may manage models."""
        self.kind: type[BaseModel] = kind

        async def read(request: Request) -> Response:
            if manages:
                require_manager()
            return await handler(request, await read_body(request, kind))

        super().__init__(path, read, methods=["POST"])


class GetRoute(Route):
    """A route that answers GET with what `read` returns, as JSON."""

    def __init__(self, path: str, read: Callable[[], Mapping[str, Any]]) -> None:
        async def get(_request: Request) -> Response:
            return JsonResponse(read())

        super().__init__(path, get)


def require_manager() -> None:
    """Raises HttpError (403) unless the caller of the current request may load and unload models.

    A key may manage models if its entry says so (`edgespec key add NAME --manage`), and so may the key of --api-key. If
    a server has no keys, callers on this machine may.
    """
    if not request_context().caller.may_manage:
        raise HttpError(
            403,
            "this caller may not manage models.",
            hint="Send a key made with `edgespec key add --manage`; a web page also needs --allow-origin.",
        )


async def reject_path(request: Request, error: Exception) -> Response:
    known = error if isinstance(error, HTTPException) else HTTPException(404)
    message = "unknown path." if known.status_code == 404 else f"{request.method} is not allowed at this path."
    refusal = HttpError(known.status_code, message, hint="GET /openapi.json lists the paths.")
    response = error_response(request.url.path, refusal)
    response.headers.update(known.headers or {})
    return response


_SERVER = re.compile(r"edgespec-[0-9a-f]{16}")  # our names in the header Via; others in it are not passed on


@cache
def _name_process() -> str:
    """A name that no other server has, drawn at its first use."""
    return f"edgespec-{secrets.token_hex(8)}"


def check_proxy_loop(headers: Mapping[str, str]) -> None:
    """Keep the names of the servers that have passed a request on, for `format_via`. Raises HttpError (508) if this
    server is among them.
    """
    servers = _SERVER.findall(headers.get("via", ""))
    if _name_process() in servers:
        raise HttpError(
            508,
            "the request came back to the server that had sent it.",
            hint="Correct the url of this model in the file of --config.",
        )
    request_context().servers = tuple(servers)


def format_via() -> str:
    """The Via header of a request that is sent on behalf of the current one."""
    return ", ".join(f"1.1 {server}" for server in (*request_context().servers, _name_process()))
