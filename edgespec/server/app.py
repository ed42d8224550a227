"""The ASGI application: its routes, what guards them, and its start and end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from edgespec.server.access_log import AccessLog
from edgespec.server.generation_routes import generation_routes
from edgespec.server.guard import Guard, Rules
from edgespec.server.http import HttpError, error_response
from edgespec.server.metrics import ServerMetrics
from edgespec.server.model_routes import model_routes
from edgespec.server.models import Models
from edgespec.server.ollama_routes import ollama_routes
from edgespec.server.status import status_routes
from edgespec.server.token_routes import token_routes
from edgespec.server.web_page import page_routes


def application(models: Models, rules: Rules, metrics: ServerMetrics, preload: Sequence[str] = ()) -> Starlette:
    """The ASGI application. It loads the models of `preload` at its start, and others as requests name them; they are
    closed when it shuts down.
    """

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        work = [models.watch(), models.preload(preload), *(slot.watch() for slot in models.remotes.values())]
        tasks = [asyncio.create_task(each) for each in work]
        gc.freeze()  # what has been imported stays: no collection has to look at it
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await models.close()

    middleware = [Middleware(Guard, rules=rules)]
    if rules.origins:  # CORS is the outermost: it answers preflights, and web pages can read the guard's refusals
        cors = Middleware(
            CORSMiddleware,
            allow_origins=sorted(rules.origins),
            allow_methods=["DELETE", "GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,
        )
        middleware.insert(0, cors)
    middleware.insert(0, Middleware(AccessLog, registry=metrics.registry))
    return Starlette(
        routes=[
            *generation_routes(models),
            *token_routes(models),
            *model_routes(models),
            *ollama_routes(models),
            *status_routes(models, metrics),
            *page_routes(),
        ],
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={404: reject_path, 405: reject_path},
    )


async def reject_path(request: Request, error: Exception) -> Response:
    """The response to an unknown path or method."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    message = "unknown path." if status == 404 else f"{request.method} is not allowed at this path."
    hint = "GET /openapi.json lists the paths."
    response = error_response(request.url.path, HttpError(status, message, hint=hint))
    response.headers.update((isinstance(error, HTTPException) and error.headers) or {})
    return response
