"""The routes of the server, and the call that all interfaces come down to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from functools import wraps
from time import time
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgespec.server.anthropic import CountRequest, MessagesRequest
from edgespec.server.chat import ChatRequest
from edgespec.server.chat_format import reader_of, tool_format
from edgespec.server.completions import CompletionRequest
from edgespec.server.embeddings import EmbeddingRequest
from edgespec.server.fields import Body, ModelName
from edgespec.server.generation_spec import GenerationSpec
from edgespec.server.guard import Guard, Rules
from edgespec.server.http import (
    EventStream,
    HttpError,
    JsonResponse,
    body_of,
    error_response,
    expected,
    until_disconnect,
)
from edgespec.server.metrics import ServerMetrics
from edgespec.server.models import Models
from edgespec.server.openapi import document
from edgespec.server.response import Part, ResponseStream, merged
from edgespec.server.responses import ResponsesRequest
from edgespec.server.status import status_routes

_GONE = 499  # as nginx has it; nobody reads it
Handler = Callable[[Request], Awaitable[Response]]


class UnloadRequest(Body):
    """The body of /unload."""

    model: ModelName


class Writer(Protocol):
    """How an interface writes answers. `index` counts those of one call; the parts of one come in order."""

    def add(self, index: int, part: Part) -> None:
        """Gather for `response_body`."""

    def response_body(self) -> dict[str, Any]:
        """The body, once all has been added."""

    def chunks(self, index: int, part: Part) -> Iterator[bytes]:
        """What is sent of `part` while streaming."""

    def finish(self) -> Iterator[bytes]:
        """What is sent after all answers."""


class Answerable(Protocol):
    """A checked body that asks for answers."""

    model: str
    n: Any
    stream: Any

    def generation_spec(self) -> GenerationSpec: ...

    def writer(self) -> Writer: ...


def application(models: Models, rules: Rules, server_metrics: ServerMetrics) -> Starlette:
    """The ASGI application; models are opened by calls and closed with it."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(models.watch())
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await models.close()

    def answering(kind: type[Body]) -> Handler:
        async def answer(request: Request) -> Response:
            body: Any = await body_of(request, kind)
            return await _answered(request, models, body)

        return _told(answer)

    async def count(request: Request) -> Response:
        body = await body_of(request, CountRequest)
        slot = models.find(body.model)
        async with models.turn(slot) as model_info:
            counted = await slot.count(body.generation_spec().request(model_info, most_tokens=1))
        return JsonResponse({"input_tokens": counted})

    async def listed(_request: Request) -> Response:
        return JsonResponse({"object": "list", "data": [_model(name) for name in models.slots]})

    async def one(request: Request) -> Response:
        return JsonResponse(_model(models.find(request.path_params["name"]).name))

    async def unload(request: Request) -> Response:
        await models.find((await body_of(request, UnloadRequest)).model).unload()
        return JsonResponse({})

    async def openapi(_request: Request) -> Response:
        return JsonResponse(document())

    async def not_found(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        told = "there is nothing at this address." if status == 404 else f"{request.method} is not for this address."
        return error_response(request.url.path, HttpError(status, told, hint="The interfaces are below /v1."))

    async def embeddings(request: Request) -> Response:
        body = await body_of(request, EmbeddingRequest)
        texts, slot = body.inputs(), models.find(body.model)

        async def made() -> dict[str, Any]:
            async with models.turn(slot):
                return body.answer(await slot.embed(texts))

        answer = await until_disconnect(request, made())
        return JsonResponse(answer) if answer is not None else Response(status_code=_GONE)

    routes = [
        Route("/v1/chat/completions", answering(ChatRequest), methods=["POST"]),
        Route("/v1/completions", answering(CompletionRequest), methods=["POST"]),
        Route("/v1/responses", answering(ResponsesRequest), methods=["POST"]),
        Route("/v1/messages", answering(MessagesRequest), methods=["POST"]),
        Route("/v1/messages/count_tokens", _told(count), methods=["POST"]),
        Route("/v1/embeddings", _told(embeddings), methods=["POST"]),
        Route("/v1/models", listed),
        Route("/unload", _told(unload), methods=["POST"]),
        Route("/openapi.json", openapi),
        Route("/v1/models/{name:path}", _told(one)),
        *status_routes(models, server_metrics),
    ]
    # The outermost first. Browsers ask before they call, without a key; CORS answers that for the allowed origins.
    middleware = [Middleware(Guard, rules=rules)]
    if rules.origins:
        middleware.append(Middleware(CORSMiddleware, allow_origins=sorted(rules.origins), allow_methods=["GET", "POST"],
                                     allow_headers=["*"]))  # fmt: skip
    return Starlette(routes=routes, middleware=middleware, lifespan=lifespan,
                     exception_handlers={404: not_found, 405: not_found})  # fmt: skip


async def _answered(request: Request, models: Models, body: Answerable) -> Response:
    generation_spec, writer, copies = body.generation_spec(), body.writer(), body.n or 1
    if body.stream:
        return EventStream(request.url.path, _events(_parts(models, body.model, generation_spec, copies), writer))

    async def response_body() -> dict[str, Any]:
        async with aclosing(_parts(models, body.model, generation_spec, copies)) as parts:
            async for index, part in parts:
                writer.add(index, part)
        return writer.response_body()

    answer = await until_disconnect(request, response_body())
    return JsonResponse(answer) if answer is not None else Response(status_code=_GONE)


async def _events(parts: AsyncGenerator[tuple[int, Part], None], writer: Writer) -> AsyncGenerator[bytes, None]:
    async with aclosing(parts):
        async for index, part in parts:
            for event in writer.chunks(index, part):
                yield event
    for event in writer.finish():
        yield event


async def _parts(
    models: Models, name: str, generation_spec: GenerationSpec, copies: int
) -> AsyncGenerator[tuple[int, Part], None]:
    """The parts of all answers, one answer after the other. Raises any EdgespecError."""
    slot = models.find(name)
    for copy in range(copies):
        model_info = await models.enter(slot, is_new=copy == 0)
        try:
            request = generation_spec.request(model_info, most_tokens=model_info.context_size, copy=copy)
            form = tool_format(model_info.template)
            reader = reader_of(form, generation_spec.tools_in_use) if generation_spec.needs_reader(form) else None
            reply = ResponseStream(reader, model_info.plain_speed, is_several=generation_spec.several is not False)
            started = slot.stream(request)
        except BaseException:
            slot.leave()
            raise
        async with started as reading:
            async for batch in reading:
                for part in merged([part for event in batch for part in reply.parts(event)]):
                    yield copy, part


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(time()), "owned_by": "edgespec"}


def _told(handler: Handler) -> Handler:
    """Errors of `handler` as the interface writes them."""

    @wraps(handler)
    async def told(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:  # noqa: BLE001 - a bug of ours is logged, and the server goes on
            return error_response(request.url.path, expected(error))

    return told
