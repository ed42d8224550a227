"""The routes that only read: embeddings and counts of tokens."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgespec.answers.generation_spec import GenerationSpec
from edgespec.errors import InvalidRequest
from edgespec.server.anthropic import CountRequest
from edgespec.server.fields import AnyModelName, ResidencyBody
from edgespec.server.http import BodyRoute, JsonResponse, respond_unless_disconnected
from edgespec.server.models import Models
from edgespec.server.openai import ChatRequest
from edgespec.server.remote import RemoteSlot
from edgespec.server.responses import ResponsesRequest
from edgespec.server.slots import ModelSlot

Id = Annotated[int, Field(ge=0, le=2**31 - 1)]
_ITEMS = Field(max_length=2**20, fail_fast=True)
Ids = Annotated[list[Id], _ITEMS]
_MAX_INPUTS = 2048  # OpenAI's limit


class EmbeddingRequest(ResidencyBody):
    """A body that asks for embeddings.

    input       texts, or their tokens; `prompt` at Ollama's older path
    dimensions  of each vector; None: the model's own
    truncate    leave out the end of a text that the context does not hold; None: as the interface does
    """

    model: AnyModelName = ""
    input: str | Annotated[list[str], _ITEMS] | Ids | Annotated[list[Ids], _ITEMS] = Field(
        validation_alias=AliasChoices("input", "prompt")
    )
    dimensions: int | None = None
    truncate: bool | None = None
    encoding_format: Literal["float", "base64"] | None = None

    def inputs(self) -> list[str | list[int]]:
        """The inputs, each as text or as token ids. Raises InvalidRequest if there are too many."""
        inputs: list[Any] = self.input if isinstance(self.input, list) else [self.input]
        inputs = [inputs] if inputs and isinstance(inputs[0], int) else inputs
        if len(inputs) > _MAX_INPUTS:
            raise InvalidRequest(f"there are more than {_MAX_INPUTS:,} inputs.", hint="Send several requests.")
        return inputs


def format_openai(body: EmbeddingRequest, vectors: list[tuple[float, ...]], tokens: int) -> dict[str, Any]:
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
    path: str,
    models: Models,
    write: Callable[[EmbeddingRequest, list[tuple[float, ...]], int], dict[str, Any]],
    *,
    truncates: bool = False,
) -> Route:
    """The route at `path`. `write` makes the body of the response from the request, a vector for each input, and the
    number of tokens of all inputs.
    `truncates`: texts that are too long are cut, unless the body says otherwise.
    """

    async def handle(request: Request, body: EmbeddingRequest) -> Response:
        inputs, slot = body.inputs(), models.choose(body.model)
        body = body.model_copy(update={"model": body.model or slot.name})
        slot.apply_keep_alive(body.keep_alive)

        async def embed() -> dict[str, Any]:
            async with models.turn(slot):
                truncate = truncates if body.truncate is None else body.truncate
                found = await slot.embed(inputs, body.dimensions, truncate=truncate) if inputs else []
            size = len(found[0].vector) if found else None
            if found and body.dimensions not in (None, size):
                raise InvalidRequest(f"embeddings have the model's own size, {size:,}.", hint="Remove dimensions.")
            return write(body, [each.vector for each in found], sum(each.tokens for each in found))

        return await respond_unless_disconnected(request, embed())

    return BodyRoute(path, EmbeddingRequest, handle)


def token_routes(models: Models) -> list[Route]:
    """The routes that count the tokens of a prompt. They wait until the model is loaded, but not for a turn among the
    requests that generate.
    """

    async def count(request: Request, body: ChatRequest | ResponsesRequest | CountRequest) -> Response:
        slot = models.choose(body.model)
        if isinstance(slot, RemoteSlot):
            tokens = await slot.count(body, await request.body())
        else:
            tokens = await _count(models, slot, body.generation_spec())
        head = {} if isinstance(body, CountRequest) else {"object": "response.input_tokens"}
        return JsonResponse({**head, "input_tokens": tokens})

    return [
        BodyRoute("/v1/messages/count_tokens", CountRequest, count),
        BodyRoute("/v1/chat/completions/input_tokens", ChatRequest, count),
        BodyRoute("/v1/responses/input_tokens", ResponsesRequest, count),
    ]


async def _count(models: Models, slot: ModelSlot, spec: GenerationSpec) -> int:
    async with models.visit(slot) as model_info:
        asked = spec.build_request(model_info, token_limit=1)
        (tokens,) = await slot.read(lambda client: client.count(asked.prompt, asked.variables, asked.start))
    return tokens
