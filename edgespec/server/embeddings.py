"""/v1/embeddings, and /api/embed and /api/embeddings of Ollama's interface."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from time import perf_counter_ns
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from pydantic import Field, PrivateAttr
from starlette.requests import Request
from starlette.responses import Response

from edgespec.engine.prompts import Embedding
from edgespec.errors import InvalidRequest
from edgespec.server.controls import ResidencyBody
from edgespec.server.fields import AnyModelName
from edgespec.server.http import Handler, read_body, respond_unless_disconnected
from edgespec.server.models import Models
from edgespec.server.remote_slot import RemoteSlot
from edgespec.server.slots import Slot

Id = Annotated[int, Field(ge=0, le=2**31 - 1)]
_ITEMS = Field(max_length=2**20, fail_fast=True)
Ids = Annotated[list[Id], _ITEMS]
_MAX_INPUTS = 2048  # OpenAI's limit


class EmbeddingBody(Protocol):
    """A validated body that asks for embeddings."""

    model: str

    @property
    def dimensions(self) -> int | None:
        """Of each vector; None: the model's own."""

    def keep(self, slot: Slot) -> tuple[str, ...]: ...

    def inputs(self) -> Sequence[str | list[int]]:
        """Raises InvalidRequest."""

    def response_body(self, embeddings: list[Embedding]) -> dict[str, Any]:
        """The body of the response. Raises InvalidRequest."""


class EmbeddingRequest(ResidencyBody):
    """The body of /v1/embeddings."""

    model: AnyModelName = ""
    input: str | Annotated[list[str], _ITEMS] | Ids | Annotated[list[Ids], _ITEMS]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    def inputs(self) -> list[str | list[int]]:
        """Raises InvalidRequest."""
        inputs: list[Any] = self.input if isinstance(self.input, list) else [self.input]
        if not inputs:
            raise InvalidRequest("input is empty.", hint="Send at least one text.")
        return _limit([inputs] if isinstance(inputs[0], int) else inputs)

    def response_body(self, embeddings: list[Embedding]) -> dict[str, Any]:
        """The body of the response, one entry for each input. Raises InvalidRequest for other `dimensions`."""
        _check_size(embeddings, self.dimensions)
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


class OllamaEmbedRequest(ResidencyBody):
    """The body of /api/embed."""

    model: AnyModelName = ""
    input: str | Annotated[list[str], _ITEMS]
    dimensions: int | None = None
    _start_ns: int = PrivateAttr(default_factory=perf_counter_ns)

    def inputs(self) -> list[str]:
        """Raises InvalidRequest."""
        return _limit([self.input] if isinstance(self.input, str) else self.input)

    def response_body(self, embeddings: list[Embedding]) -> dict[str, Any]:
        """The body of the response; times are in nanoseconds. Raises InvalidRequest for other `dimensions`."""
        _check_size(embeddings, self.dimensions)
        return {
            "model": self.model,
            "embeddings": [each.vector for each in embeddings],
            "total_duration": perf_counter_ns() - self._start_ns,
            "load_duration": 0,
            "prompt_eval_count": sum(each.tokens for each in embeddings),
        }


class OllamaEmbeddingsRequest(ResidencyBody):
    """The body of /api/embeddings, the older path for one text."""

    model: AnyModelName = ""
    prompt: str

    @property
    def dimensions(self) -> None:
        """The model's own."""

    def inputs(self) -> list[str]:
        return [self.prompt]

    def response_body(self, embeddings: list[Embedding]) -> dict[str, Any]:
        return {"embedding": embeddings[0].vector}


def embedding_handler(
    models: Models, kind: type[EmbeddingRequest | OllamaEmbedRequest | OllamaEmbeddingsRequest]
) -> Handler:
    """Answers requests with a body of this kind."""

    async def handle(request: Request) -> Response:
        body: EmbeddingBody = await read_body(request, kind)
        inputs, slot = body.inputs(), models.choose(body.model)
        body.keep(slot)

        async def embed() -> dict[str, Any]:
            async with models.turn(slot) as turn:
                if not inputs:
                    return body.response_body([])
                if isinstance(slot, RemoteSlot):
                    return body.response_body(await slot.embed(inputs, turn.ends_s, body.dimensions))
                return body.response_body(await slot.embed(inputs, turn.ends_s))

        return await respond_unless_disconnected(request, embed())

    return handle


def _limit(inputs: list[Any]) -> list[Any]:
    """Raises InvalidRequest."""
    if len(inputs) > _MAX_INPUTS:
        raise InvalidRequest(f"there are more than {_MAX_INPUTS:,} inputs.", hint="Send several requests.")
    return inputs


def _check_size(embeddings: Sequence[Embedding], dimensions: int | None) -> None:
    """Raises InvalidRequest."""
    size = len(embeddings[0].vector) if embeddings else None
    if size is not None and dimensions not in (None, size):
        raise InvalidRequest(f"embeddings have the model's own size, {size:,}.", hint="Remove dimensions.")
