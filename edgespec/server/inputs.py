"""The routes that only read: embeddings, counts of tokens, tokens of a text, prompts of a conversation."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgespec.engine.events import Request as EngineRequest
from edgespec.errors import InvalidRequest
from edgespec.server.anthropic import CountRequest
from edgespec.server.fields import AnyModelName, Body, ResidencyBody
from edgespec.server.http import BodyRoute, JsonResponse, respond_unless_disconnected
from edgespec.server.models import Models, require_local
from edgespec.server.openai import ChatRequest
from edgespec.server.remote import RemoteSlot
from edgespec.server.responses import ResponsesRequest
from edgespec.service.client import EngineClient, ModelInfo, Stream

Id = Annotated[int, Field(ge=0, le=2**31 - 1)]
_ITEMS = Field(max_length=2**20, fail_fast=True)
Ids = Annotated[list[Id], _ITEMS]
_MAX_INPUTS = 2048  # OpenAI's limit


class EmbeddingRequest(ResidencyBody):
    """A body that asks for embeddings.

    input       texts, or their tokens; `prompt` at Ollama's older path
    dimensions  of each vector; None: the model's own
    """

    model: AnyModelName = ""
    input: str | Annotated[list[str], _ITEMS] | Ids | Annotated[list[Ids], _ITEMS] = Field(
        validation_alias=AliasChoices("input", "prompt")
    )
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None

    def inputs(self) -> list[str | list[int]]:
        """What is embedded. Raises InvalidRequest."""
        inputs: list[Any] = self.input if isinstance(self.input, list) else [self.input]
        inputs = [inputs] if inputs and isinstance(inputs[0], int) else inputs
        if len(inputs) > _MAX_INPUTS:
            raise InvalidRequest(f"there are more than {_MAX_INPUTS:,} inputs.", hint="Send several requests.")
        return inputs


def format_openai(body: EmbeddingRequest, vectors: list[tuple[float, ...]], tokens: int) -> dict[str, Any]:
    """The body of /v1/embeddings."""
    data: list[Any] = [*vectors]
    if body.encoding_format == "base64":
        data = [base64.b64encode(np.array(vector, "<f4").tobytes()).decode() for vector in vectors]
    return {
        "object": "list",
        "model": body.model,
        "data": [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(data)],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def embedding_route(
    path: str, models: Models, write: Callable[[EmbeddingRequest, list[tuple[float, ...]], int], dict[str, Any]]
) -> Route:
    """The route at `path`. `write` makes the body of the response of a vector for each input and of their tokens."""

    async def handle(request: Request, body: EmbeddingRequest) -> Response:
        inputs, slot = body.inputs(), models.choose(body.model)
        body = body.model_copy(update={"model": body.model or slot.name})
        slot.apply_keep_alive(body.keep_alive)

        async def embed() -> dict[str, Any]:
            async with models.turn(slot):
                found = await slot.embed(inputs, body.dimensions) if inputs else []
            size = len(found[0].vector) if found else None
            if found and body.dimensions not in (None, size):
                raise InvalidRequest(f"embeddings have the model's own size, {size:,}.", hint="Remove dimensions.")
            return write(body, [each.vector for each in found], sum(each.tokens for each in found))

        return await respond_unless_disconnected(request, embed())

    return BodyRoute(path, EmbeddingRequest, handle)


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
    """Counts of tokens, tokens of a text and text of tokens, prompts of a conversation.

    They wait for the model to be loaded, and for nobody who generates. /tokenize, /detokenize and /apply-template are
    those of llama.cpp's server.
    """

    async def read(name: str, ask: Callable[[EngineClient, ModelInfo], Stream[T]]) -> T:
        slot = require_local(models.choose(name))
        async with models.visit(slot) as model_info:
            (found,) = await slot.read(lambda client: ask(client, model_info))
            return found

    async def read_prompt(body: Any, ask: Callable[[EngineClient, EngineRequest], Stream[T]]) -> T:
        """`ask` is called with what the body asks of the engine."""
        spec = body.generation_spec()
        return await read(
            body.model, lambda client, model_info: ask(client, spec.build_request(model_info, token_limit=1))
        )

    async def count(request: Request, body: ChatRequest | ResponsesRequest | CountRequest) -> Response:
        slot = models.choose(body.model)
        if isinstance(slot, RemoteSlot):
            tokens = await slot.count(body, await request.body())
        else:
            tokens = await read_prompt(body, lambda client, each: client.count(each.prompt, each.variables, each.start))
        head = {} if isinstance(body, CountRequest) else {"object": "response.input_tokens"}
        return JsonResponse({**head, "input_tokens": tokens})

    async def tokenize(_request: Request, body: TokenizeRequest) -> Response:
        options = {"add_special": body.add_special, "parse_special": body.parse_special}
        tokens = await read(body.model, lambda client, _: client.tokenize(body.content, **options))
        if not body.with_pieces:
            return JsonResponse({"tokens": tokens})
        pieces = await read(body.model, lambda client, _: client.token_bytes(tokens))
        described = [{"id": id_, "piece": _format(piece)} for id_, piece in zip(tokens, pieces, strict=True)]
        return JsonResponse({"tokens": described})

    async def detokenize(_request: Request, body: DetokenizeRequest) -> Response:
        pieces = await read(body.model, lambda client, _: client.token_bytes(body.tokens))
        return JsonResponse({"content": b"".join(pieces).decode("utf-8", "replace")})

    async def apply_template(request: Request, body: ChatRequest) -> Response:
        prompt = await read_prompt(body, lambda client, each: client.render(each))
        return JsonResponse({"prompt": prompt})

    return [
        BodyRoute("/v1/messages/count_tokens", CountRequest, count),
        BodyRoute("/v1/chat/completions/input_tokens", ChatRequest, count),
        BodyRoute("/v1/responses/input_tokens", ResponsesRequest, count),
        BodyRoute("/tokenize", TokenizeRequest, tokenize),
        BodyRoute("/detokenize", DetokenizeRequest, detokenize),
        BodyRoute("/apply-template", ChatRequest, apply_template),
    ]


def _format(piece: bytes) -> str | list[int]:
    """Text, or bytes where a token ends inside a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
