"""What heads share with their target on MLX: its embeddings and its output matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from edgespec.backends.attached_draft import OTHER_HEAD, Unsupported
from edgespec.backends.mlx.heads.draft_vocabulary import DraftVocabulary
from edgespec.backends.mlx.heads.weights import HeadWeights
from edgespec.formats.head_tensors import read_draft_ids


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a head shares with mlx-lm's `model`.

    vocab_size   V
    hidden_size  H
    embed        embeddings [n, H] of tokens [n]
    score        logits [n, V] of states [n, H]
    """

    model: Any
    vocab_size: int
    hidden_size: int
    embed: Callable[[Any], Any]
    score: Callable[[Any], Any]

    def find_embedding(self, weights: HeadWeights, size: int) -> Callable[[Any], Any]:
        """The head's own embeddings [V, size], if it has any. Raises InvalidModelFile."""
        return weights.embedding("embedding", self.vocab_size, size) if "embedding" in weights else self.embed

    def find_output(
        self, weights: HeadWeights, size: int, name: str = "output"
    ) -> tuple[DraftVocabulary, Callable[[Any], Any]]:
        """The tokens that the head scores, and the matrix [W, size]: its own of this name, or the target's.

        Raises InvalidModelFile, and Unsupported for rows that are not tokens of the target.
        """
        rows, ids = weights.shape(name)[0] if name in weights else self.vocab_size, None
        if "d2t" in weights:
            ids = mx.array(read_draft_ids(np.array(weights.table("d2t")), self.vocab_size))
        if rows != (self.vocab_size if ids is None else ids.size):
            raise Unsupported(
                f"the head scores {rows:,} tokens and does not name them in the vocabulary of {self.vocab_size:,}.",
                hint=OTHER_HEAD,
            )
        output = weights.linear(name, rows, size) if name in weights else self.score
        return DraftVocabulary(ids, self.vocab_size), output


def read_target(model: Any) -> TargetParts:
    """Reads shapes from lazy arrays of mlx-lm's model; nothing is computed. Raises Unsupported."""
    embeddings = [each for each in model.modules() if isinstance(each, nn.Embedding | nn.QuantizedEmbedding)]
    if not embeddings:
        raise Unsupported("this model has no embeddings that a head could share.", hint=OTHER_HEAD)
    outputs = [each for name, each in model.named_modules() if name.rsplit(".", 1)[-1] == "lm_head"]
    embed, token = embeddings[0], mx.array([[0]], mx.int32)
    score = outputs[0] if outputs else embed.as_linear  # if both are tied
    return TargetParts(model, model(token).shape[-1], embed(token).shape[-1], embed, score)
