"""The ASGI application: its routes, and the generation behind each interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from functools import wraps
from itertools import product
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
from edgespec.server.completions import CompletionRequest
from edgespec.server.embeddings import EmbeddingRequest
from edgespec.server.fields import Body, ModelName
from edgespec.server.guard import Guard, Rules
from edgespec.server.http import (
    EventStream,
    HttpError,
    JsonResponse,
    error_response,
    hide_internal_error,
    read_body,
    respond_unless_disconnected,
)
from edgespec.server.metrics import ServerMetrics
from edgespec.server.models import Models
from edgespec.server.ollama import OllamaChatRequest, OllamaGenerateRequest
from edgespec.server.ollama_lines import LineStream
from edgespec.server.ollama_models import API_VERSION, ShowRequest, list_running, list_tags, show
from edgespec.server.openapi import document
from edgespec.server.responses import ResponsesRequest
from edgespec.server.status import status_routes
from edgespec.service.generation_spec import GenerationSpec
from edgespec.service.response import Part, merge_deltas

Handler = Callable[[Request], Awaitable[Response]]


class UnloadRequest(Body):
    """The body of /unload. `now`: end the model's process, whatever it does; its requests fail."""

    model: ModelName
    now: bool = False


class Writer(Protocol):
    """Writes the answers to one request. `index` numbers the answers; the parts of one answer come in order."""

    def add(self, index: int, part: Part) -> None:
        """Collect a part for `response_body`."""

    def response_body(self) -> dict[str, Any]:
        """The body, after all parts have been added."""

    def chunks(self, index: int, part: Part) -> Iterator[bytes]:
        """The events of a part, for a stream."""

    def finish(self) -> Iterator[bytes]:
        """The events after all answers."""


class GenerationBody(Protocol):
    """A validated body that asks for `n` answers to each of its prompts, at once or as a stream."""

    model: str
    n: Any
    stream: Any

    def generation_specs(self) -> Sequence[GenerationSpec]: ...

    def writer(self) -> Writer: ...


def application(models: Models, rules: Rules, metrics: ServerMetrics) -> Starlette:
    """The ASGI application. Requests load models; they are closed when it shuts down."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        watch = asyncio.create_task(models.watch())
        try:
            yield
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            await models.close()

    middleware = [Middleware(Guard, rules=rules)]
    if rules.origins:  # CORS is the outermost: it answers preflights, and web pages can read the guard's refusals
        cors = Middleware(
            CORSMiddleware,
            allow_origins=sorted(rules.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,
        )
        middleware.insert(0, cors)
    return Starlette(
        routes=[
            *generation_routes(models),
            *model_routes(models),
            *ollama_routes(models),
            *status_routes(models, metrics),
        ],
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={404: reject_path, 405: reject_path},
    )


def generation_routes(models: Models) -> list[Route]:
    """The interfaces that generate text, and Anthropic's token count."""

    def generate(kind: type[Body]) -> Handler:
        async def handle(request: Request) -> Response:
            body: Any = await read_body(request, kind)
            return await _generate(request, models, body)

        return handle

    async def count_tokens(request: Request) -> Response:
        body = await read_body(request, CountRequest)
        slot = models.choose(body.model)
        async with models.turn(slot) as turn:
            counted = body.generation_spec().build_request(turn.model_info, token_limit=1)
            count = await slot.count(counted, turn.ends_s)
        return JsonResponse({"input_tokens": count})

    return [
        _post("/v1/chat/completions", generate(ChatRequest)),
        _post("/v1/completions", generate(CompletionRequest)),
        _post("/v1/responses", generate(ResponsesRequest)),
        _post("/v1/messages", generate(MessagesRequest)),
        _post("/v1/messages/count_tokens", count_tokens),
    ]


def model_routes(models: Models) -> list[Route]:
    """The list of models, embeddings, unloading, and the OpenAPI document."""

    async def list_models(_request: Request) -> Response:
        return JsonResponse({"object": "list", "data": [models.describe(slot) for slot in models.slots.values()]})

    async def get_model(request: Request) -> Response:
        return JsonResponse(models.describe(models.find(request.path_params["name"])))

    async def unload_model(request: Request) -> Response:
        body = await read_body(request, UnloadRequest)
        slot = models.find(body.model)
        await (slot.stop() if body.now else slot.unload())
        return JsonResponse({})

    async def create_embeddings(request: Request) -> Response:
        body = await read_body(request, EmbeddingRequest)
        inputs, slot = body.inputs(), models.choose(body.model)

        async def embed() -> dict[str, Any]:
            async with models.turn(slot) as turn:
                return body.response_body(await slot.embed(inputs, turn.ends_s))

        return await respond_unless_disconnected(request, embed())

    async def get_openapi(_request: Request) -> Response:
        return JsonResponse(document())

    return [
        _post("/v1/embeddings", create_embeddings),
        Route("/v1/models", list_models),
        _post("/unload", unload_model),
        Route("/openapi.json", get_openapi),
        Route("/v1/models/{name:path}", _catch_errors(get_model)),
    ]


def ollama_routes(models: Models) -> list[Route]:
    """Ollama's interface."""

    def generate(kind: type[OllamaChatRequest] | type[OllamaGenerateRequest]) -> Handler:
        async def handle(request: Request) -> Response:
            body: OllamaChatRequest | OllamaGenerateRequest = await read_body(request, kind)
            if not body.is_empty:
                return await _generate(request, models, body, LineStream)
            slot = models.choose(body.model)
            body.model = body.model or slot.name
            if body.unloads:
                await slot.unload()
            else:
                async with models.turn(slot):
                    pass
            return JsonResponse(body.writer().load_body("unload" if body.unloads else "load"))

        return handle

    async def show_model(request: Request) -> Response:
        body = await read_body(request, ShowRequest)
        return JsonResponse(show(models, models.choose(body.model or body.name)))

    async def get_tags(_request: Request) -> Response:
        return JsonResponse(list_tags(models))

    async def get_running(_request: Request) -> Response:
        return JsonResponse(list_running(models))

    async def get_version(_request: Request) -> Response:
        return JsonResponse({"version": API_VERSION})

    return [
        _post("/api/chat", generate(OllamaChatRequest)),
        _post("/api/generate", generate(OllamaGenerateRequest)),
        _post("/api/show", show_model),
        Route("/api/tags", get_tags),
        Route("/api/ps", get_running),
        Route("/api/version", get_version),
    ]


async def reject_path(request: Request, error: Exception) -> Response:
    """The response to an unknown path or method."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    message = "unknown path." if status == 404 else f"{request.method} is not allowed at this path."
    hint = "GET /openapi.json lists the paths."
    response = error_response(request.url.path, HttpError(status, message, hint=hint))
    response.headers.update((isinstance(error, HTTPException) and error.headers) or {})
    return response


async def _generate(
    request: Request, models: Models, body: GenerationBody, stream: type[EventStream] = EventStream
) -> Response:
    body.model = body.model or models.choose("").name  # which the answer repeats
    specs, writer, copies = body.generation_specs(), body.writer(), body.n or 1
    if body.stream:
        return stream(request.url.path, _events(_parts(models, body.model, specs, copies), writer))

    async def collect() -> dict[str, Any]:
        async with aclosing(_parts(models, body.model, specs, copies)) as parts:
            async for index, part in parts:
                writer.add(index, part)
        return writer.response_body()

    return await respond_unless_disconnected(request, collect())


async def _events(parts: AsyncGenerator[tuple[int, Part], None], writer: Writer) -> AsyncGenerator[bytes, None]:
    async with aclosing(parts):
        async for index, part in parts:
            for event in writer.chunks(index, part):
                yield event
    for event in writer.finish():
        yield event


async def _parts(
    models: Models, name: str, specs: Sequence[GenerationSpec], copies: int
) -> AsyncGenerator[tuple[int, Part], None]:
    """The parts of `copies` answers to each of `specs`, one answer after the other. Raises any EdgespecError."""
    slot = models.choose(name)
    for index, (spec, copy) in enumerate(product(specs, range(copies))):
        turn = await models.enter(slot, is_new=index == 0)
        model_info = turn.model_info
        try:
            request = spec.build_request(model_info, token_limit=model_info.context_size, copy=copy)
            response = spec.make_response(model_info, model_info.plain_speed, request.structure)
        except BaseException:
            slot.leave()
            raise
        async with slot.stream(request, turn.ends_s) as batches:  # which ends the turn
            async for batch in batches:
                for part in merge_deltas([part for event in batch for part in response.parts(event)]):
                    yield index, part


def _post(path: str, handler: Handler) -> Route:
    return Route(path, _catch_errors(handler), methods=["POST"])


def _catch_errors(handler: Handler) -> Handler:
    """`handler`, with its errors as responses in the format of the interface."""

    @wraps(handler)
    async def catch(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:  # noqa: BLE001 - a bug is logged and must not stop the server
            return error_response(request.url.path, hide_internal_error(error))

    return catch
