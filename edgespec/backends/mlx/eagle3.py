"""The network of an EAGLE-3 head (Li et al. 2025): one layer over the target's hidden states and the next token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.mlx.draft_vocabulary import DraftVocabulary, OneMatrix
from edgespec.backends.mlx.head_layer import HeadLayer, LayerShape, read_layer_shape
from edgespec.backends.mlx.head_weights import HeadWeights, read_arrays
from edgespec.backends.mlx.keyvalues import KeyValues
from edgespec.backends.mlx.target_parts import OTHER_HEAD, TargetParts, read_target
from edgespec.formats.head_tensors import eagle3_names, read_draft_ids
from edgespec.formats.heads import HeadSpec


class Eagle3Network(OneMatrix):
    """A head with weights in neutral names (formats.head_tensors.eagle3_names).

    H is the target's hidden size, h the head's, V the target's vocabulary size. A pair is a token and the features of
    the token before it.
    """

    depth = 1

    def __init__(self, spec: HeadSpec, shape: LayerShape, weights: HeadWeights, target: TargetParts) -> None:
        """Embeddings and output matrix are those of `target` where the head has none of its own.

        Raises InvalidModelFile for tensors of other shapes, Unsupported for a head that the target does not fit.
        """
        target.check(spec)
        if spec.size != target.hidden_size and not ("embedding" in weights and "output" in weights):
            raise Unsupported(
                f"the head has a size of {spec.size:,}, and not its own embeddings and output matrix.", hint=OTHER_HEAD
            )
        self.spec = spec
        self._eps = shape.eps
        self._fc = weights.linear("fc", spec.size, len(spec.layers or (0,)) * spec.hidden_size)
        sizes = dict.fromkeys(("embedding_norm", "feature_norm", "output_norm"), spec.size)
        if spec.norm_before_fc == "all":
            sizes["input_norm"] = len(spec.layers or (0,)) * spec.hidden_size
        elif spec.norm_before_fc == "each":
            sizes |= {f"fc_norm.{i}": spec.hidden_size for i in range(len(self.layers))}
        self._norms = {name: weights.vector(name, size) for name, size in sizes.items()}
        self._layer = HeadLayer(weights, shape, 2 * spec.size)
        self._embed = target.find_embedding(weights, spec.size)
        self.vocabulary, self._output = _read_output(spec, weights, target)
        weights.load()
        self.nbytes, self._dtype = weights.nbytes, weights.dtype

    @property
    def layers(self) -> tuple[int, ...]:
        """See formats.heads.HeadSpec."""
        return self.spec.layers or ()

    def fuse(self, features: Any) -> Any:
        """States [n, h] that stand for the target's features [n, layers * H]."""
        features = features.astype(self._dtype)
        if self.spec.norm_before_fc == "all":
            features = self._norm(features, "input_norm")
        elif self.spec.norm_before_fc == "each":
            parts = mx.split(features, len(self.layers), axis=-1)
            features = mx.concatenate([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], axis=-1)
        return self._fc(features)

    def run(self, tokens: Any, states: Any, caches: Sequence[KeyValues]) -> Any:
        """See PairNetwork."""
        normed = self._norm(states, "feature_norm")
        embedded = self._embed(tokens).astype(states.dtype)
        x = mx.concatenate([self._norm(embedded, "embedding_norm"), normed], axis=-1)
        h = (normed if self.spec.norm_before_residual else states) + self._layer.attend(x, caches[0])
        return h + self._layer.feed_forward(h)

    def feed_back(self, output: Any) -> Any:
        """See PairNetwork."""
        return self._norm(output, "output_norm") if self.spec.feeds_normed else output

    def score(self, output: Any) -> Any:
        """See PairNetwork."""
        return self.vocabulary.spread(self._output(self._norm(output, "output_norm")).astype(mx.float32))

    def _norm(self, x: Any, name: str) -> Any:
        return mx.fast.rms_norm(x, self._norms[name], self._eps)


def read_network(folder: Path, spec: HeadSpec, target: Any) -> Eagle3Network:
    """The head in a folder with config.json and safetensors, for mlx-lm's model `target`.

    Raises InvalidModelFile, Unsupported, CacheError, BackendError.
    """
    arrays = read_arrays(folder)
    weights = HeadWeights(arrays, eagle3_names(arrays))
    return Eagle3Network(spec, read_layer_shape(folder), weights, read_target(target))


def _read_output(
    spec: HeadSpec, weights: HeadWeights, target: TargetParts
) -> tuple[DraftVocabulary, Callable[[Any], Any]]:
    """The tokens that the head scores; the output matrix."""
    rows = weights.rows("output") if "output" in weights else target.vocab_size
    if "d2t" in weights:
        ids, _ = read_draft_ids(np.array(weights.table("d2t")), target.vocab_size)
        if len(ids) == rows:
            output = weights.linear("output", rows, spec.size) if "output" in weights else target.score
            return DraftVocabulary(mx.array(ids), target.vocab_size), output
    elif rows == target.vocab_size:
        return DraftVocabulary(None, target.vocab_size), target.find_output(weights, spec.size)
    raise Unsupported(
        f"the head scores {rows:,} tokens and does not name them in the vocabulary of {target.vocab_size:,}.",
        hint=OTHER_HEAD,
    )
