"""/v1/embeddings: OpenAI's interface for embeddings."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from edgespec.engine.embeddings import Embedding
from edgespec.errors import InvalidRequest
from edgespec.server.fields import ModelName
from edgespec.server.residency import ResidencyBody

Id = Annotated[int, Field(ge=0, le=2**31 - 1)]
_ITEMS = Field(max_length=2**20, fail_fast=True)
Ids = Annotated[list[Id], _ITEMS]
_MAX_INPUTS = 2048  # OpenAI's limit


class EmbeddingRequest(ResidencyBody):
    """The body of /v1/embeddings."""

    model: ModelName = ""
    input: str | Annotated[list[str], _ITEMS] | Ids | Annotated[list[Ids], _ITEMS]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    def inputs(self) -> list[str | list[int]]:
        """Raises InvalidRequest."""
        inputs: list[Any] = self.input if isinstance(self.input, list) else [self.input]
        if not inputs:
            raise InvalidRequest("input is empty.", hint="Send at least one text.")
        if isinstance(inputs[0], int):
            inputs = [inputs]
        if len(inputs) > _MAX_INPUTS:
            raise InvalidRequest(f"there are more than {_MAX_INPUTS:,} inputs.", hint="Send several requests.")
        return inputs

    def response_body(self, embeddings: list[Embedding]) -> dict[str, Any]:
        """The body of the response, one entry for each input. Raises InvalidRequest for other `dimensions`."""
        size = len(embeddings[0].vector)
        if self.dimensions not in (None, size):
            raise InvalidRequest(f"embeddings have the model's own size, {size:,}.", hint="Remove dimensions.")
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
