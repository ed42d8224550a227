"""/v1/embeddings: OpenAI's interface to texts as vectors."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from edgespec.engine.embeddings import Embedding
from edgespec.errors import InvalidRequest
from edgespec.server.fields import Body, ModelName

Id = Annotated[int, Field(ge=0, le=2**31 - 1)]
_ITEMS = Field(max_length=2**20, fail_fast=True)
Ids = Annotated[list[Id], _ITEMS]
_MOST = 2048  # inputs, as OpenAI has it


class EmbeddingRequest(Body):
    """The body of /v1/embeddings."""

    model: ModelName
    input: str | Annotated[list[str], _ITEMS] | Ids | Annotated[list[Ids], _ITEMS]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    def inputs(self) -> list[str | list[int]]:
        """Raises InvalidRequest."""
        if self.dimensions is not None:
            raise InvalidRequest("embeddings have the model's own size.", hint="Leave dimensions out.")
        given: list[Any] = self.input if isinstance(self.input, list) else [self.input]
        if not given:
            raise InvalidRequest("there is no input.", hint="Send a text.")
        if isinstance(given[0], int):
            given = [given]
        if len(given) > _MOST:
            raise InvalidRequest(f"there are more than {_MOST:,} inputs.", hint="Send them in several calls.")
        return given

    def answer(self, found: list[Embedding]) -> dict[str, Any]:
        """The body of the answer."""
        tokens = sum(each.tokens for each in found)
        return {
            "object": "list",
            "model": self.model,
            "data": [
                {"object": "embedding", "index": i, "embedding": self._written(each.vector)}
                for i, each in enumerate(found)
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def _written(self, vector: tuple[float, ...]) -> list[float] | str:
        if self.encoding_format == "base64":
            return base64.b64encode(np.array(vector, "<f4").tobytes()).decode()
        return list(vector)
