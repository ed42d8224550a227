"""The routes of models: their list, embeddings, loading and unloading; and the OpenAPI document."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgespec.server.embeddings import EmbeddingRequest, embedding_handler
from edgespec.server.guard import require_manager
from edgespec.server.http import JsonResponse, read_body, respond_unless_disconnected
from edgespec.server.models import Models, require_local
from edgespec.server.openapi import document
from edgespec.server.record import current_record
from edgespec.server.residency import LoadRequest, UnloadRequest
from edgespec.server.routes import catch_errors, post


def model_routes(models: Models) -> list[Route]:
    """The list of models, embeddings, loading and unloading, and the OpenAPI document."""

    async def list_models(_request: Request) -> Response:
        return JsonResponse({"object": "list", "data": [models.describe(slot) for slot in models.all]})

    async def get_model(request: Request) -> Response:
        return JsonResponse(models.describe(models.find(request.path_params["name"])))

    async def load_model(request: Request) -> Response:
        require_manager()
        body = await read_body(request, LoadRequest)
        slot = require_local(models.find(body.model))
        body.keep(slot)

        async def load() -> dict[str, Any]:
            async with models.turn(slot):
                return {"success": True}

        return await respond_unless_disconnected(request, load())

    async def unload_model(request: Request) -> Response:
        require_manager()
        body = await read_body(request, UnloadRequest)
        slot = require_local(models.find(body.model))
        current_record().model = slot.name
        await (slot.stop() if body.now else slot.unload())
        return JsonResponse({"success": True})

    async def get_openapi(_request: Request) -> Response:
        return JsonResponse(document())

    return [
        post("/v1/embeddings", embedding_handler(models, EmbeddingRequest)),
        Route("/v1/models", list_models),
        post("/models/load", load_model),
        post("/models/unload", unload_model),
        Route("/openapi.json", get_openapi),
        Route("/v1/models/{name:path}", catch_errors(get_model)),
    ]
