"""The ASGI application of `edgespec draft serve`; edgespec/drafters/remote/messages.py has the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from edgespec.drafters.remote.messages import MAX_GUESSES, PATH, PROTOCOL, Fault, encode
from edgespec.server.access_log import AccessLog
from edgespec.server.draft_model import DraftModel
from edgespec.server.draft_session import DraftSession
from edgespec.server.guard import Guard, Rules
from edgespec.server.http import HttpError, JsonResponse, error_response, hide_internal_error

_MAX_VOCABULARY = 2**22


def draft_application(model: DraftModel, rules: Rules) -> Starlette:
    """The ASGI application; it closes `model` when it shuts down."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            model.close()

    async def describe(_request: Request) -> Response:
        return JsonResponse(model.describe())

    return Starlette(
        routes=[Route(PATH, describe), Route(PATH, Sessions(model), methods=["POST"])],
        middleware=[Middleware(AccessLog, registry=CollectorRegistry()), Middleware(Guard, rules=rules)],
        lifespan=lifespan,
        exception_handlers={404: _reject, 405: _reject},
    )


class Sessions:
    """POST: a session, whose messages go in both bodies at the same time."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            vocab_size, guesses = self._check(Request(scope))
            cache = await self._model.take(vocab_size)
        except Exception as error:  # noqa: BLE001 - a bug is logged and must not stop the server
            await error_response(scope["path"], hide_internal_error(error))(scope, receive, send)
            return

        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        is_sound = False
        try:
            headers = [(b"content-type", b"application/octet-stream"), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await write(b"")
            is_sound = await DraftSession(self._model, cache, guesses, write).serve(_read(receive))
        except asyncio.CancelledError:  # the server stops
            with suppress(OSError):
                await write(encode(Fault("the server is shutting down.")))
        finally:
            await self._model.give_back(cache, is_sound=is_sound)
        await send({"type": "http.response.body", "body": b""})

    def _check(self, request: Request) -> tuple[int, int]:
        """The size of the client's vocabulary, and guesses. Raises HttpError where there can be no session."""
        model, query = self._model, request.query_params
        if query.get("protocol") != str(PROTOCOL):
            raise HttpError(
                409,
                f"the client speaks version {query.get('protocol', 'none')[:20]} of the protocol, and the draft server "
                f"version {PROTOCOL}.",
                hint="Install the same version of edgespec on both machines.",
            )
        if query.get("tokenizer") != model.tokenizer:
            message = f"the tokenizer of {model.name} is not the target's."
            raise HttpError(409, message, hint="Serve a draft of the target's family.")
        vocab_size, guesses = (_read_number(query.get(name, "")) for name in ("vocab_size", "guesses"))
        if not 0 < vocab_size <= _MAX_VOCABULARY or guesses < 0:
            message = "vocab_size and guesses have to be numbers."
            raise HttpError(400, message, hint="Send the size of the target's vocabulary.")
        if model.is_full:
            message = "all caches of the draft server are in use."
            raise HttpError(429, message, hint="Raise --parallel, or try again later.")
        return vocab_size, min(guesses, MAX_GUESSES)


def _read_number(text: str) -> int:
    """-1 for what is no number."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else -1


async def _read(receive: Receive) -> AsyncIterator[bytes]:
    """The parts of a request's body, to its end or that of the connection."""
    while (message := await receive())["type"] != "http.disconnect":
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


async def _reject(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    message = "unknown path." if status == 404 else f"{request.method} is not allowed at this path."
    return error_response(request.url.path, HttpError(status, message, hint=f"A draft server has {PATH} alone."))
