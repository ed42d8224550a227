"""Networks of trained heads on MLX: EAGLE, MTP, DFlash, DSpark and Gemma 4 assistants."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from edgespec.backends.attached_draft import OTHER_HEAD, Unsupported
from edgespec.backends.head_session import read_block
from edgespec.backends.mlx.caches import KeyValues
from edgespec.backends.mlx.forward import ForwardContext
from edgespec.backends.mlx.heads.parts import HeadLayer, LayerShape, read_head_config, read_layer_shape
from edgespec.backends.mlx.heads.runner import HeadNetwork
from edgespec.backends.mlx.heads.target_parts import TargetParts
from edgespec.backends.mlx.heads.weights import HeadWeights
from edgespec.backends.mlx.session import MlxSession
from edgespec.errors import InvalidModelFile
from edgespec.formats.head_tensors import HEAD_NAMES
from edgespec.formats.heads import HEAD_HINT, HeadSpec

Arrays = Mapping[str, Any]
_OUTER_NORMS = ("embedding_norm", "feature_norm", "output_norm")


class PairNetwork(HeadNetwork):
    """Layers over pairs of a token and the target's hidden state of the token before it.

    EAGLE and EAGLE-2 (Li et al. 2024, arXiv:2401.15077) and MTP layers (DeepSeek-V3, arXiv:2412.19437, section 2.2)
    join the two by `fc`, MTP after a norm of each. EAGLE-3 (Li et al. 2025) fuses the states of several layers by `fc`;
    the attention of its layer reads both parts.
    """

    takes_trees = True

    def __init__(
        self,
        spec: HeadSpec,
        shape: LayerShape,
        weights: HeadWeights,
        target: TargetParts,
        shifts: Mapping[str, float] | None = None,
    ) -> None:
        """`shifts` are added to the weights of norms, those of "layers" included.

        Embeddings and output matrix are those of `target` if the head has none of its own. Raises InvalidModelFile
        for tensors of other shapes, Unsupported for a head that the target does not fit.
        """
        size, self._fuses = spec.size, spec.kind == "eagle3"
        if size != target.hidden_size and not ("embedding" in weights and "output" in weights):
            raise Unsupported(
                f"the head has a size of {size:,}, and not its own embeddings and output matrix.", hint=OTHER_HEAD
            )
        self._spec, self._eps, self.layers = spec, shape.eps, spec.layers or ()
        width = max(len(self.layers), 1) * spec.hidden_size
        sizes = {name: size for name in _OUTER_NORMS if name in weights}
        if spec.norm_before_fc == "all":
            sizes["input_norm"] = width
        elif spec.norm_before_fc == "each":
            sizes |= {f"fc_norm.{i}": spec.hidden_size for i in range(len(self.layers))}
        shifts = shifts or {}
        self._fc = weights.linear("fc", size, width if self._fuses else 2 * size)
        self._norms = {name: weights.vector(name, n, shifts.get(name, 0.0)) for name, n in sizes.items()}
        joined, shift = 2 * size if self._fuses else size, shifts.get("layers", 0.0)
        self._layers = [HeadLayer(weights, shape, joined, prefix, shift) for prefix in weights.layer_prefixes]
        self.depth = len(self._layers)
        self._embed = target.find_embedding(weights, size)
        vocabulary, output = target.find_output(weights, size)
        self._outputs = [output]
        self._finish(weights, vocabulary)

    def fuse(self, features: Any) -> Any:
        features = features.astype(self.dtype)
        if not self._fuses:
            return features
        if self._spec.norm_before_fc == "each":
            parts = mx.split(features, len(self.layers), axis=-1)
            features = mx.concatenate([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], axis=-1)
        return self._fc(self._norm(features, "input_norm"))

    def run(self, tokens: Any, states: Any, caches: Sequence[KeyValues]) -> Any:
        embedded = self._norm(self._embed(tokens).astype(states.dtype), "embedding_norm")
        normed = self._norm(states, "feature_norm")
        x = mx.concatenate([embedded, normed], axis=-1)
        if self._fuses:
            h = normed if self._spec.norm_before_residual else states
        else:
            h = x = self._fc(x)
        for layer, cache in zip(self._layers, caches, strict=True):
            h = x = layer.run(x, cache, h)
        return h

    def feed_back(self, output: Any) -> Any:
        return self._norm(output, "output_norm") if self._spec.feeds_normed else output

    def score(self, output: Any, n: int = 1) -> Any:
        return self.vocabulary.spread(self.score_known(output))

    def score_known(self, output: Any) -> Any:
        """Logits [n, W] float32 of the tokens of `vocabulary` alone."""
        return self._outputs[0](self._norm(output, "output_norm")).astype(mx.float32)

    def _norm(self, x: Any, name: str) -> Any:
        return mx.fast.rms_norm(x, self._norms[name], self._eps) if name in self._norms else x


def read_pairs(folder: Path, spec: HeadSpec, arrays: Arrays, target: TargetParts) -> PairNetwork:
    """The EAGLE or MTP head in a folder, which may be the target's."""
    if spec.kind == "mtp":
        arrays = _stack_experts(arrays)
    weights = HeadWeights(arrays, HEAD_NAMES[spec.kind](arrays))
    shifts = find_shifts(weights) if spec.kind == "mtp" else None
    return PairNetwork(spec, read_layer_shape(folder), weights, target, shifts)


# Names of the MTP layer's experts; those of the target's layers do not match
_EXPERT = re.compile(
    r"(?P<mlp>(?:.*\bmtp\.)?layers\.0\.mlp\.)experts\.(?:(?P<index>\d+)\.)?(?P<part>\w+_proj)(?:\.weight)?$"
)
_PLAIN_MEAN = 0.5  # means of weights are near 1, or near 0 if a file holds them less 1


def _stack_experts(arrays: Arrays) -> Arrays:
    """`arrays` with the matrices of all experts of the MTP layer in one, as mlx-lm has them in its own folders.

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


def find_shifts(weights: HeadWeights) -> dict[str, float]:
    """What is to be added to the weights of each norm of an MTP head, by neutral name; "layers": to those inside.

    Original files with Qwen's names hold them less 1. Some converters add 1 to all, some to those of the layer alone,
    some to the last one. The two norms before `fc` have true means of 0.3 to 0.5, so their size does not tell; but a
    mean below 0 does.
    """
    if weights.names["fc"].endswith("eh_proj.weight"):  # DeepSeek's names
        return {}
    layer = [weights.mean(name) for name in ("attention_norm", "ffn_norm", "q_norm", "k_norm") if name in weights]
    is_short = sum(layer) < _PLAIN_MEAN * len(layer)
    shifts = {name: float(is_short or weights.mean(name) < 0) for name in ("embedding_norm", "feature_norm")}
    return shifts | {"layers": float(is_short), "output_norm": float(weights.mean("output_norm") < _PLAIN_MEAN)}


_PLAIN: Mapping[str, tuple[object, ...]] = {  # values of a config that ask for nothing beyond what is computed here
    "hidden_act": ("silu",),
    "rope_is_neox_style": (True,),
    "attention_value_scale": (1,),
    "input_embedding_scale": (1,),
    "markov_head_type": ("vanilla",),
}


class BlockKeys(KeyValues):
    """Keys and values of one layer, where the rows of a block see each other. Rows before a window are masked."""

    def __init__(self, window: int | None, *, is_causal: bool) -> None:
        super().__init__(ForwardContext())
        self._reach = window
        self._is_causal = is_causal

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """[N, length + N] what the N rows of a block attend to; None for everything."""
        end = self.length + N
        if not self._is_causal and (self._reach is None or end <= self._reach):
            return None
        rows, keys = mx.arange(self.length, end)[:, None], mx.arange(end)[None]
        mask = keys <= rows if self._is_causal else mx.ones((N, end), mx.bool_)
        return mask if self._reach is None else mask & (rows - keys < self._reach)


class BlockNetwork(HeadNetwork):
    """DFlash (Chen et al. 2026): one forward fills a block of masks over the target's hidden states.

    The scores of a row of DSpark also depend on the token before the one that it predicts, through two small matrices.
    W is the size of the draft's vocabulary.
    """

    reads_pairs = False

    def __init__(self, folder: Path, spec: HeadSpec, arrays: Arrays, target: TargetParts) -> None:
        """Raises InvalidModelFile, CacheError, BackendError; Unsupported for a head that the target does not fit."""
        self.layers, size = spec.layers or (), target.hidden_size
        if any("selector" in name for name in arrays):
            hint = "Take its GGUF file with a GGUF file of the model, or another head."
            raise Unsupported("the head is a DFlash2 head, which edgespec runs on llama.cpp alone.", hint=hint)
        weights, shape = HeadWeights(arrays, HEAD_NAMES[spec.kind](arrays)), read_layer_shape(folder)
        self._eps = shape.eps
        self._fc = weights.linear("fc", size, len(self.layers) * size)
        self._norms = [weights.vector(name, size) for name in ("feature_norm", "output_norm")]
        self._layers = [HeadLayer(weights, shape, size, prefix) for prefix in weights.layer_prefixes]
        self.depth = len(self._layers)
        self._block = read_block(spec, target.vocab_size)
        self.n_drafts = 1 + len(self._block[0]) - self._block[1]
        self._attention = _read_attention(folder, self.depth)
        vocabulary, output = target.find_output(weights, size)
        self._outputs = [output]
        self._embed = target.find_embedding(weights, size)
        self._markov: Any = None
        if spec.kind == "dspark":
            if "markov_1" not in weights or "markov_2" not in weights:
                raise InvalidModelFile("The DSpark head lacks its Markov head.", hint=HEAD_HINT)
            rank = weights.shape("markov_1")[-1]
            self._markov = weights.embedding("markov_1", target.vocab_size, rank)
            self._outputs.append(weights.linear("markov_2", vocabulary.size, rank))
        self._finish(weights, vocabulary)

    def open_caches(self, target: MlxSession, position: int) -> Any:
        return [BlockKeys(window, is_causal=is_causal) for window, is_causal in self._attention]

    def fuse(self, features: Any) -> Any:
        return mx.fast.rms_norm(self._fc(features.astype(self.dtype)), self._norms[0], self._eps)

    def run(self, tokens: Any, states: Any, caches: Sequence[KeyValues]) -> Any:
        for layer, cache in zip(self._layers, caches, strict=True):
            layer.inject(states, cache)
        return [cache.state for cache in caches]

    def start_draft(self, root: int, output: Any, caches: Sequence[KeyValues]) -> Any:
        """The output [n_drafts, H] of the rows that predict tokens; for DSpark (their scores [n_drafts, W], root [1]).

        No row stays in the caches. All rows of a block run, as in training: since they attend to each other, the scores
        of fewer rows would be others.
        """
        held, (masks, first_row) = caches[0].length, self._block
        x = self._embed(mx.array([root, *masks], mx.int32)).astype(self.dtype)
        try:
            for layer, cache in zip(self._layers, caches, strict=True):
                x = layer.run(x, cache, x)
        finally:
            for cache in caches:
                cache.rewind(held)
        rows = mx.fast.rms_norm(x[first_row:], self._norms[1], self._eps)
        return rows if self._markov is None else (self._outputs[0](rows).astype(mx.float32), mx.array([root]))

    def follow(self, token: Any, output: Any, caches: Any) -> Any:
        """The scores of the next row of DSpark, and the token before it."""
        return output[0][1:], token

    def score(self, output: Any, n: int = 1) -> Any:
        if self._markov is None:
            return self.vocabulary.spread(self._outputs[0](output[:n]).astype(mx.float32))
        scores, token = output
        return self.vocabulary.spread(scores[:1] + self._outputs[1](self._markov(token)).astype(mx.float32))


_SLIDING = "sliding_attention"


def _read_attention(folder: Path, count: int) -> list[tuple[int | None, bool]]:
    """Reads for each of `count` layers how many positions a row attends to, None for all, and whether it is causal.

    A window without `use_sliding_window` or `use_swa` means nothing. If the config does not say whether layers are
    causal, those that `layer_types` calls sliding are, as in z-lab's reference (github.com/z-lab/dflash). Raises
    InvalidModelFile, CacheError; Unsupported for layers that compute something else.
    """
    config = read_head_config(folder)
    for key, allowed in _PLAIN.items():
        if (value := config.get(key)) is not None and value not in allowed:
            raise Unsupported(f"no head is run whose config.json says {key} = {str(value)[:40]}.", hint=OTHER_HEAD)
    if (stated := config.get("num_hidden_layers", count)) != count:
        raise InvalidModelFile(f"The head has {count} layers, its config.json names {stated}.", hint=HEAD_HINT)
    stated, kinds = config.get("is_causal", config.get("causal")), config.get("layer_types")
    known = kinds if isinstance(kinds, list) and len(kinds) == count else [None] * count
    causal = [kind == _SLIDING if stated is None else stated is True for kind in known]
    window = config.get("swa_window_size") or config.get("sliding_window")
    everywhere = config.get("use_swa") is True
    if not (everywhere or config.get("use_sliding_window") is True) or type(window) is not int or window < 1:
        return [(None, each) for each in causal]
    if not everywhere and known is not kinds:
        raise InvalidModelFile("The head's config.json has a window and not a type for each layer.", hint=HEAD_HINT)
    windows = [window if everywhere or kind == _SLIDING else None for kind in known]
    return list(zip(windows, causal, strict=True))
