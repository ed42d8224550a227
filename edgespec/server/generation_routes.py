"""The routes of the interfaces that generate text."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgespec.server.anthropic import MessagesRequest
from edgespec.server.chat import ChatRequest
from edgespec.server.completions import CompletionRequest
from edgespec.server.fields import Body
from edgespec.server.generation import generate
from edgespec.server.http import read_body
from edgespec.server.models import Models
from edgespec.server.responses import ResponsesRequest
from edgespec.server.routes import Handler, post


def generation_routes(models: Models) -> list[Route]:
    """The interfaces that generate text."""

    def handler(kind: type[Body]) -> Handler:
        async def handle(request: Request) -> Response:
            body: Any = await read_body(request, kind)
            return await generate(request, models, body)

        return handle

    return [
        post("/v1/chat/completions", handler(ChatRequest)),
        post("/v1/completions", handler(CompletionRequest)),
        post("/v1/responses", handler(ResponsesRequest)),
        post("/v1/messages", handler(MessagesRequest)),
    ]
