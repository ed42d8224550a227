"""What heads share with their target on MLX: its embeddings and its output matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.mlx.head_weights import HeadWeights
from edgespec.formats.heads import HeadSpec

OTHER_HEAD = "Use a head that was trained for this model, or --draft auto."


@dataclass(frozen=True, slots=True)
class TargetParts:
    """Of mlx-lm's model.

    vocab_size   V
    hidden_size  H
    embed        embeddings [n, H] of tokens [n]
    score        logits [n, V] of states [n, H]
    """

    vocab_size: int
    hidden_size: int
    embed: Callable[[Any], Any]
    score: Callable[[Any], Any]

    def check(self, spec: HeadSpec) -> None:
        """Raises Unsupported for a head of another hidden size."""
        if spec.hidden_size != self.hidden_size:
            raise Unsupported(
                f"the head is for a hidden size of {spec.hidden_size:,}; the model has {self.hidden_size:,}.",
                hint=OTHER_HEAD,
            )

    def find_embedding(self, weights: HeadWeights, size: int) -> Callable[[Any], Any]:
        """The head's own embeddings [V, size], if it has any. Raises InvalidModelFile, Unsupported."""
        if "embedding" not in weights:
            return self.embed
        self._check_rows(weights, "embedding")
        embedding: Callable[[Any], Any] = weights.embedding("embedding", self.vocab_size, size)
        return embedding

    def find_output(self, weights: HeadWeights, size: int, name: str = "output") -> Callable[[Any], Any]:
        """The head's own output matrix [V, size] of this name, if it has one. Raises InvalidModelFile, Unsupported."""
        if name not in weights:
            return self.score
        self._check_rows(weights, name)
        output: Callable[[Any], Any] = weights.linear(name, self.vocab_size, size)
        return output

    def _check_rows(self, weights: HeadWeights, name: str) -> None:
        if (rows := weights.rows(name)) != self.vocab_size:
            raise Unsupported(
                f"the head is for a vocabulary of {rows:,} tokens; the model has {self.vocab_size:,}.", hint=OTHER_HEAD
            )


def read_target(model: Any) -> TargetParts:
    """Of mlx-lm's model, whose shapes are read from lazy arrays; nothing is computed. Raises Unsupported."""
    embedding = find_embedding(model)
    token = mx.array([[0]], mx.int32)
    return TargetParts(model(token).shape[-1], embedding(token).shape[-1], embedding, find_output(model))


def find_embedding(model: Any) -> Any:
    """The module that looks up tokens in mlx-lm's model. Raises Unsupported."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            return module
    raise Unsupported("this model has no embeddings that a head could share.", hint=OTHER_HEAD)


def find_output(model: Any) -> Any:
    """The output matrix of mlx-lm's model, or its embeddings where these are tied. Raises Unsupported."""
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] == "lm_head":
            return module
    return find_embedding(model).as_linear
