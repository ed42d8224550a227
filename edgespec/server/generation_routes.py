"""The routes of the interfaces that generate text, and Anthropic's token count."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgespec.server.anthropic import CountRequest, MessagesRequest
from edgespec.server.chat import ChatRequest
from edgespec.server.completions import CompletionRequest
from edgespec.server.fields import Body
from edgespec.server.generation import generate
from edgespec.server.http import JsonResponse, read_body
from edgespec.server.models import Models
from edgespec.server.responses import ResponsesRequest
from edgespec.server.routes import Handler, post


def generation_routes(models: Models) -> list[Route]:
    """The interfaces that generate text, and Anthropic's token count."""

    def handler(kind: type[Body]) -> Handler:
        async def handle(request: Request) -> Response:
            body: Any = await read_body(request, kind)
            return await generate(request, models, body)

        return handle

    async def count_tokens(request: Request) -> Response:
        body = await read_body(request, CountRequest)
        slot = models.choose(body.model)
        async with models.turn(slot) as turn:
            counted = body.generation_spec().build_request(turn.model_info, token_limit=1)
            count = await slot.count(counted, turn.ends_s)
        return JsonResponse({"input_tokens": count})

    return [
        post("/v1/chat/completions", handler(ChatRequest)),
        post("/v1/completions", handler(CompletionRequest)),
        post("/v1/responses", handler(ResponsesRequest)),
        post("/v1/messages", handler(MessagesRequest)),
        post("/v1/messages/count_tokens", count_tokens),
    ]
