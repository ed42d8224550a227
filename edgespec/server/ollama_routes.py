"""The routes of Ollama's interface."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgespec.server.downloads import Downloads
from edgespec.server.embeddings import OllamaEmbeddingsRequest, OllamaEmbedRequest, embedding_handler
from edgespec.server.generation import generate
from edgespec.server.guard import require_manager
from edgespec.server.http import JsonResponse, read_body, respond_unless_disconnected
from edgespec.server.models import Models, require_local
from edgespec.server.ollama import OllamaChatRequest, OllamaGenerateRequest
from edgespec.server.ollama_lines import LineStream, format_line
from edgespec.server.ollama_models import (
    API_VERSION,
    DeleteRequest,
    PullRequest,
    ShowRequest,
    describe_success,
    format_progress,
    list_running,
    list_tags,
    show,
)
from edgespec.server.removal import remove_model
from edgespec.server.routes import Handler, catch_errors, post


def ollama_routes(models: Models) -> list[Route]:
    """Ollama's interface."""

    def handler(kind: type[OllamaChatRequest] | type[OllamaGenerateRequest]) -> Handler:
        async def handle(request: Request) -> Response:
            body: OllamaChatRequest | OllamaGenerateRequest = await read_body(request, kind)
            if not body.is_empty:
                return await generate(request, models, body, LineStream)
            slot = models.choose(body.model)
            body.model = body.model or slot.name
            body.keep(slot)
            if body.keep_alive == 0:
                require_manager()
                await require_local(slot).unload()
            else:
                async with models.turn(slot):
                    pass
            return JsonResponse(body.writer().load_body("unload" if body.keep_alive == 0 else "load"))

        return handle

    async def show_model(request: Request) -> Response:
        body = await read_body(request, ShowRequest)
        return JsonResponse(show(models, models.choose(body.model or body.name)))

    async def delete_model(request: Request) -> Response:
        require_manager()
        body = await read_body(request, DeleteRequest)
        await remove_model(models, body.config(models))
        return Response()

    async def get_tags(_request: Request) -> Response:
        return JsonResponse(list_tags(models))

    async def get_running(_request: Request) -> Response:
        return JsonResponse(list_running(models))

    async def get_version(_request: Request) -> Response:
        return JsonResponse({"version": API_VERSION})

    return [
        post("/api/chat", handler(OllamaChatRequest)),
        post("/api/generate", handler(OllamaGenerateRequest)),
        post("/api/embed", embedding_handler(models, OllamaEmbedRequest)),
        post("/api/embeddings", embedding_handler(models, OllamaEmbeddingsRequest)),
        post("/api/pull", pull_handler(models)),
        post("/api/show", show_model),
        Route("/api/delete", catch_errors(delete_model), methods=["DELETE"]),
        Route("/api/tags", get_tags),
        Route("/api/ps", get_running),
        Route("/api/version", get_version),
    ]


def pull_handler(models: Models) -> Handler:
    """Downloads models for callers who may manage them."""
    downloads = Downloads()

    async def pull_model(request: Request) -> Response:
        require_manager()
        body = await read_body(request, PullRequest)
        progress = downloads.pull(body.config(models))
        if body.stream:
            return LineStream(request.url.path, format_progress(models, body.model, progress), format_line)

        async def wait() -> dict[str, Any]:
            async with aclosing(progress):
                async for _ in progress:
                    pass
            return describe_success(models, body.model)

        return await respond_unless_disconnected(request, wait())

    return pull_model
