"""The routes that show how a model reads a text: counts of tokens, tokens, and prompts.

They wait for the model to be loaded, and for nobody who generates. /tokenize, /detokenize and /apply-template are those
of llama.cpp's server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgespec.engine.events import Request as EngineRequest
from edgespec.engine.prompts import RawText
from edgespec.server.anthropic import CountRequest
from edgespec.server.fields import AnyModelName, Body, compute
from edgespec.server.http import BodyRoute, JsonResponse
from edgespec.server.models import Models, require_local
from edgespec.server.openai import ChatRequest
from edgespec.server.remote_slot import RemoteSlot
from edgespec.server.responses import ResponsesRequest
from edgespec.service.client import EngineClient, Stream

T = TypeVar("T")


class TokenizeRequest(Body):
    """The body of /tokenize. `add_special` puts the token first that begins every text, if the model has one."""

    model: AnyModelName = ""
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: AnyModelName = ""
    tokens: Annotated[list[Annotated[int, Field(strict=True)]], Field(max_length=2**20, fail_fast=True)]


def token_routes(models: Models) -> list[Route]:
    """Counts of tokens, tokens of a text and text of tokens, prompts of a conversation."""

    async def read(name: str, ask: Callable[[EngineClient], Stream[T]]) -> T:
        slot = require_local(models.choose(name))
        async with models.visit(slot) as turn:
            (found,) = await slot.read(ask, turn.ends_s)
            return found

    async def read_prompt(request: Request, body: Any, ask: Callable[[EngineClient, EngineRequest], Stream[T]]) -> T:
        """`ask` is called with what the body asks of the engine."""
        slot, size = require_local(models.choose(body.model)), len(await request.body())
        spec = await compute(size, body.generation_spec)
        async with models.visit(slot) as turn:
            model_info = turn.model_info
            assert model_info is not None
            asked = await compute(size, lambda: spec.build_request(model_info, token_limit=1))
            (found,) = await slot.read(lambda client: ask(client, asked), turn.ends_s)
            return found

    async def count(request: Request, body: ChatRequest | ResponsesRequest | CountRequest) -> Response:
        slot = models.choose(body.model)
        if isinstance(slot, RemoteSlot):
            tokens = await slot.count(body, await request.body())
        else:
            tokens = await read_prompt(request, body, _count)
        head = {} if isinstance(body, CountRequest) else {"object": "response.input_tokens"}
        return JsonResponse({**head, "input_tokens": tokens})

    async def tokenize(_request: Request, body: TokenizeRequest) -> Response:
        text = RawText(body.content, body.add_special, body.parse_special)
        tokens = await read(body.model, lambda client: client.tokenize(text))
        if not body.with_pieces:
            return JsonResponse({"tokens": tokens})
        pieces = await read(body.model, lambda client: client.token_bytes(tokens))
        described = [{"id": id_, "piece": _format(piece)} for id_, piece in zip(tokens, pieces, strict=True)]
        return JsonResponse({"tokens": described})

    async def detokenize(_request: Request, body: DetokenizeRequest) -> Response:
        pieces = await read(body.model, lambda client: client.token_bytes(body.tokens))
        return JsonResponse({"content": b"".join(pieces).decode("utf-8", "replace")})

    async def apply_template(request: Request, body: ChatRequest) -> Response:
        prompt = await read_prompt(request, body, lambda client, each: client.render(each))
        return JsonResponse({"prompt": prompt})

    return [
        BodyRoute("/v1/messages/count_tokens", CountRequest, count),
        BodyRoute("/v1/chat/completions/input_tokens", ChatRequest, count),
        BodyRoute("/v1/responses/input_tokens", ResponsesRequest, count),
        BodyRoute("/tokenize", TokenizeRequest, tokenize),
        BodyRoute("/detokenize", DetokenizeRequest, detokenize),
        BodyRoute("/apply-template", ChatRequest, apply_template),
    ]


def _count(client: EngineClient, request: EngineRequest) -> Stream[int]:
    return client.count(request.prompt, request.variables, request.start)


def _format(piece: bytes) -> str | list[int]:
    """Text, or bytes where a token ends inside a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
