"""The network of an MTP layer, which a target was trained with (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from edgespec.backends.mlx.draft_vocabulary import DraftVocabulary, OneMatrix
from edgespec.backends.mlx.head_layer import HeadLayer, LayerShape, read_layer_shape
from edgespec.backends.mlx.head_weights import HeadWeights, read_arrays
from edgespec.backends.mlx.keyvalues import KeyValues
from edgespec.backends.mlx.target_parts import TargetParts, read_target
from edgespec.formats.head_tensors import mtp_names
from edgespec.formats.heads import HeadSpec

_OUTER_NORMS = ("embedding_norm", "feature_norm", "output_norm")
_LAYER_NORMS = ("attention_norm", "ffn_norm", "q_norm", "k_norm")
_EXPERT = re.compile(  # of the layer, not of the target
    r"(?P<mlp>(?:.*\bmtp\.)?layers\.0\.mlp\.)experts\.(?:(?P<index>\d+)\.)?(?P<part>\w+_proj)(?:\.weight)?$"
)
_PLAIN_MEAN = 0.5  # means of weights are near 1, or near 0 where a file holds them less 1


class MtpNetwork(OneMatrix):
    """Joins a token's embedding with the last hidden state before it, and runs one layer of the target's kind.

    H is the hidden size of both. A pair is a token and the state of the token before it.
    """

    depth = 1

    def __init__(
        self, spec: HeadSpec, shape: LayerShape, weights: HeadWeights, shifts: Mapping[str, float], target: TargetParts
    ) -> None:
        """`shifts` are added to the weights of norms.

        Raises InvalidModelFile for tensors of other shapes, Unsupported for a head that the target does not fit.
        """
        target.check(spec)
        self.layers, size = spec.layers or (), target.hidden_size
        self._eps, self._feeds_normed = shape.eps, spec.feeds_normed
        self._fc = weights.linear("fc", size, 2 * size)
        self._norms = {name: weights.vector(name, size, shifts[name]) for name in (*_OUTER_NORMS, "attention_norm")}
        self._layer = HeadLayer(weights, shape, size, shift=shifts["ffn_norm"])
        self._embed = target.find_embedding(weights, size)
        self._output = target.find_output(weights, size)
        self.vocabulary = DraftVocabulary(None, target.vocab_size)
        weights.load()
        self.nbytes, self._dtype = weights.nbytes, weights.dtype

    def fuse(self, features: Any) -> Any:
        """See PairNetwork."""
        return features.astype(self._dtype)

    def run(self, tokens: Any, states: Any, caches: Sequence[KeyValues]) -> Any:
        """See PairNetwork."""
        embedded = self._embed(tokens).astype(states.dtype)
        parts = [self._norm(embedded, "embedding_norm"), self._norm(states, "feature_norm")]
        h = self._fc(mx.concatenate(parts, axis=-1))
        h = h + self._layer.attend(self._norm(h, "attention_norm"), caches[0])
        return h + self._layer.feed_forward(h)

    def feed_back(self, output: Any) -> Any:
        """See PairNetwork."""
        return self._norm(output, "output_norm") if self._feeds_normed else output

    def score(self, output: Any) -> Any:
        """See PairNetwork."""
        return self.vocabulary.spread(self._output(self._norm(output, "output_norm")).astype(mx.float32))

    def _norm(self, x: Any, name: str) -> Any:
        return mx.fast.rms_norm(x, self._norms[name], self._eps)


def read_network(folder: Path, spec: HeadSpec, target: Any) -> MtpNetwork:
    """The head in a folder with config.json and safetensors, which may be the target's, for mlx-lm's model `target`.

    Raises InvalidModelFile, Unsupported, CacheError, BackendError.
    """
    arrays = _stack_experts(read_arrays(folder))
    names = mtp_names(arrays)
    weights = HeadWeights(arrays, names)
    return MtpNetwork(spec, read_layer_shape(folder), weights, find_shifts(weights, names), read_target(target))


def _stack_experts(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """With the matrices of all experts of the MTP layer in one array, as mlx-lm has them in its own folders.

    Original files have one for each expert, or one for all with those for gate and up behind each other.
    """
    found = {name: each for name, each in arrays.items() if not _EXPERT.match(name)}
    groups: dict[str, dict[int, Any]] = {}
    for name, each in arrays.items():
        if not (match := _EXPERT.match(name)):
            continue
        stem = f"{match['mlp']}switch_mlp."
        if match["index"]:
            groups.setdefault(f"{stem}{match['part']}.weight", {})[int(match["index"])] = each
        elif match["part"] == "gate_up_proj":
            halves = mx.split(each, 2, axis=1)
            found |= {f"{stem}{part}_proj.weight": half for part, half in zip(("gate", "up"), halves, strict=True)}
        else:
            found[f"{stem}{match['part']}.weight"] = each
    return found | {name: mx.stack([group[i] for i in sorted(group)]) for name, group in groups.items()}


def find_shifts(weights: HeadWeights, names: Mapping[str, str]) -> dict[str, float]:
    """What is to be added to the weights of each norm, by neutral name; `names` are those of `mtp_names`.

    Original files with Qwen's names hold them less 1. Some converters add 1 to all, some to those of the layer alone,
    some to the last one. The two norms before `fc` have true means of 0.3 to 0.5, so their size does not tell; but a
    mean below 0 does.
    """
    if names["fc"].endswith("eh_proj.weight"):  # DeepSeek's names
        return dict.fromkeys((*_OUTER_NORMS, *_LAYER_NORMS), 0.0)
    layer = [weights.mean(name) for name in _LAYER_NORMS if name in weights]
    is_short = sum(layer) < _PLAIN_MEAN * len(layer)
    shifts = dict.fromkeys(_LAYER_NORMS, float(is_short))
    shifts["output_norm"] = float(weights.mean("output_norm") < _PLAIN_MEAN)
    for name in ("embedding_norm", "feature_norm"):
        shifts[name] = float(is_short or weights.mean(name) < 0)
    return shifts
