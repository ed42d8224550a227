"""/v1/embeddings, and /api/embed and /api/embeddings of Ollama's interface."""

from __future__ import annotations

import base64
from time import perf_counter_ns
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, PrivateAttr
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgespec.engine.prompts import Embedding
from edgespec.errors import InvalidRequest
from edgespec.server.fields import AnyModelName, ResidencyBody
from edgespec.server.http import BodyRoute, respond_unless_disconnected
from edgespec.server.models import Models

Id = Annotated[int, Field(ge=0, le=2**31 - 1)]
_ITEMS = Field(max_length=2**20, fail_fast=True)
Ids = Annotated[list[Id], _ITEMS]
_MAX_INPUTS = 2048  # OpenAI's limit


class EmbeddingBody(ResidencyBody):
    """A body that asks for embeddings. `dimensions`: of each vector; None: the model's own."""

    model: AnyModelName = ""
    dimensions: int | None = None

    def inputs(self) -> list[str | list[int]]:
        """What is embedded. Raises InvalidRequest."""
        raise NotImplementedError

    def response_body(self, embeddings: list[Embedding]) -> dict[str, Any]:
        """The body of the response, one entry for each input."""
        raise NotImplementedError


class EmbeddingRequest(EmbeddingBody):
    """The body of /v1/embeddings."""

    input: str | Annotated[list[str], _ITEMS] | Ids | Annotated[list[Ids], _ITEMS]
    encoding_format: Literal["float", "base64"] | None = None

    def inputs(self) -> list[str | list[int]]:
        inputs: list[Any] = self.input if isinstance(self.input, list) else [self.input]
        if not inputs:
            raise InvalidRequest("input is empty.", hint="Send at least one text.")
        return [inputs] if isinstance(inputs[0], int) else inputs

    def response_body(self, embeddings: list[Embedding]) -> dict[str, Any]:
        tokens = sum(each.tokens for each in embeddings)
        return {
            "object": "list",
            "model": self.model,
            "data": [
                {"object": "embedding", "index": i, "embedding": self._encode(each.vector)}
                for i, each in enumerate(embeddings)
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def _encode(self, vector: tuple[float, ...]) -> list[float] | str:
        if self.encoding_format == "base64":
            return base64.b64encode(np.array(vector, "<f4").tobytes()).decode()
        return list(vector)


class OllamaEmbedRequest(EmbeddingBody):
    """The body of /api/embed."""

    input: str | Annotated[list[str], _ITEMS]
    _start_ns: int = PrivateAttr(default_factory=perf_counter_ns)

    def inputs(self) -> list[str | list[int]]:
        return [self.input] if isinstance(self.input, str) else [*self.input]

    def response_body(self, embeddings: list[Embedding]) -> dict[str, Any]:
        """Times are in nanoseconds."""
        return {
            "model": self.model,
            "embeddings": [each.vector for each in embeddings],
            "total_duration": perf_counter_ns() - self._start_ns,
            "load_duration": 0,
            "prompt_eval_count": sum(each.tokens for each in embeddings),
        }


class OllamaEmbeddingsRequest(EmbeddingBody):
    """The body of /api/embeddings, the older path for one text."""

    prompt: str

    def inputs(self) -> list[str | list[int]]:
        return [self.prompt]

    def response_body(self, embeddings: list[Embedding]) -> dict[str, Any]:
        return {"embedding": embeddings[0].vector}


def embedding_route(path: str, models: Models, kind: type[EmbeddingBody]) -> Route:
    """The route that answers bodies of this kind."""

    async def handle(request: Request, body: EmbeddingBody) -> Response:
        inputs, slot = body.inputs(), models.choose(body.model)
        if len(inputs) > _MAX_INPUTS:
            raise InvalidRequest(f"there are more than {_MAX_INPUTS:,} inputs.", hint="Send several requests.")
        slot.apply_keep_alive(body.keep_alive)

        async def embed() -> dict[str, Any]:
            async with models.turn(slot) as turn:
                found: list[Embedding] = []
                if inputs:
                    found = await slot.embed(inputs, turn.ends_s, body.dimensions)
                size = len(found[0].vector) if found else None
                if size is not None and body.dimensions not in (None, size):
                    raise InvalidRequest(f"embeddings have the model's own size, {size:,}.", hint="Remove dimensions.")
                return body.response_body(found)

        return await respond_unless_disconnected(request, embed())

    return BodyRoute(path, kind, handle)
