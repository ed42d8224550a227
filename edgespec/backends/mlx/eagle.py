"""The network of an EAGLE-1 or EAGLE-2 head (Li et al. 2024, arXiv:2401.15077): it continues hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from edgespec.backends.mlx.draft_vocabulary import DraftVocabulary, OneMatrix
from edgespec.backends.mlx.head_layer import HeadLayer, LayerShape, read_layer_shape
from edgespec.backends.mlx.head_weights import HeadWeights, read_arrays
from edgespec.backends.mlx.keyvalues import KeyValues
from edgespec.backends.mlx.target_parts import TargetParts, read_target
from edgespec.formats.head_tensors import eagle_names
from edgespec.formats.heads import HeadSpec


class EagleNetwork(OneMatrix):
    """Predicts the target's last hidden states, which the target's output matrix scores.

    H is the hidden size of both. A pair is a token and the state of the token before it.
    """

    def __init__(self, spec: HeadSpec, shape: LayerShape, weights: HeadWeights, target: TargetParts) -> None:
        """Raises InvalidModelFile for tensors of other shapes, Unsupported for a head that the target does not fit."""
        target.check(spec)
        self.layers, size = spec.layers or (), target.hidden_size
        self._eps = shape.eps
        self._fc = weights.linear("fc", size, 2 * size)
        self._embed = target.find_embedding(weights, size)
        self._output = target.find_output(weights, size)
        self.vocabulary = DraftVocabulary(None, target.vocab_size)
        self._norms: list[Any] = [None]
        self._layers = [HeadLayer(weights, shape, size, "0.")]
        while f"{len(self._layers)}.q" in weights:
            prefix = f"{len(self._layers)}."
            self._norms.append(weights.vector(f"{prefix}attention_norm", size))
            self._layers.append(HeadLayer(weights, shape, size, prefix))
        weights.load()
        self.nbytes, self._dtype = weights.nbytes, weights.dtype

    @property
    def depth(self) -> int:
        """See PairNetwork."""
        return len(self._layers)

    def fuse(self, features: Any) -> Any:
        """See PairNetwork."""
        return features.astype(self._dtype)

    def run(self, tokens: Any, states: Any, caches: Sequence[KeyValues]) -> Any:
        """See PairNetwork."""
        h = self._fc(mx.concatenate([self._embed(tokens).astype(states.dtype), states], axis=-1))
        for layer, norm, cache in zip(self._layers, self._norms, caches, strict=True):
            h = h + layer.attend(h if norm is None else mx.fast.rms_norm(h, norm, self._eps), cache)
            h = h + layer.feed_forward(h)
        return h

    def feed_back(self, output: Any) -> Any:
        """See PairNetwork."""
        return output

    def score(self, output: Any) -> Any:
        """See PairNetwork."""
        return self.vocabulary.spread(self._output(output).astype(mx.float32))


def read_network(folder: Path, spec: HeadSpec, target: Any) -> EagleNetwork:
    """The head in a folder with config.json and safetensors, or the pickle of a release, for mlx-lm's model `target`.

    Raises InvalidModelFile, Unsupported, CacheError, BackendError.
    """
    arrays = read_arrays(folder)
    weights = HeadWeights(arrays, eagle_names(arrays))
    return EagleNetwork(spec, read_layer_shape(folder), weights, read_target(target))
