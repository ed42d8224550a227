"""Medusa and Hydra heads: several small networks over one hidden state, each for a later token."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from edgespec.backends.mlx.heads.draft_vocabulary import DraftVocabulary
from edgespec.backends.mlx.heads.networks import Arrays
from edgespec.backends.mlx.heads.parts import HeadLayer, LayerShape, read_layer_shape
from edgespec.backends.mlx.heads.runner import HeadNetwork
from edgespec.backends.mlx.heads.target_parts import TargetParts
from edgespec.backends.mlx.heads.weights import HeadWeights
from edgespec.errors import InvalidModelFile
from edgespec.formats.heads import HEAD_HINT, HeadSpec

# HEAD.LAYER.linear.weight of a residual block, HEAD.LAYER.weight of an output matrix behind the blocks
_MEDUSA_NAME = re.compile(r"(?:medusa_heads?\.)?(\d+\.\d+\.(?:linear\.)?weight)")
Blocks = Sequence[tuple[Any, Any]]
"""(linear layer of the residual, or None if it is the input itself; linear layer) of each block."""


def run_blocks(blocks: Blocks, x: Any) -> Any:
    """Run rows `x` [n, width] through residual blocks; returns [n, H]."""
    for residual, linear in blocks:
        x = (x if residual is None else residual(x)) + nn.silu(linear(x))
    return x


class MedusaNetwork(HeadNetwork):
    """Independent heads (Cai et al. 2024, arXiv:2401.10774): each guesses a later token from the target's state."""

    reads_pairs = False

    def __init__(self, weights: HeadWeights, n_blocks: Sequence[int], target: TargetParts) -> None:
        """`n_blocks` are the residual blocks of each head. A head without an output matrix uses the target's.

        Raises InvalidModelFile for tensors of other shapes, Unsupported for heads of another vocabulary.
        """
        size = target.hidden_size
        self._blocks = [
            [(None, weights.linear(f"{head}.{block}.linear.weight", size, size)) for block in range(count)]
            for head, count in enumerate(n_blocks)
        ]
        self._outputs = [
            target.find_output(weights, size, f"{head}.{count}.weight")[1] for head, count in enumerate(n_blocks)
        ]
        self.n_drafts = len(n_blocks)
        self._finish(weights, DraftVocabulary(None, target.vocab_size))

    def run(self, tokens: Any, states: Any, caches: Any) -> Any:
        return states

    def score(self, output: Any, n: int = 1) -> Any:
        """Logits [n, V] float32 of the first `n` heads for a state [1, H]."""
        rows = [run_blocks(blocks, output) for blocks in self._blocks[:n]]
        outputs = self._outputs[: len(rows)]
        if all(each is outputs[0] for each in outputs):
            scores = outputs[0](mx.concatenate(rows))
        else:
            scores = mx.concatenate([score(row) for score, row in zip(outputs, rows, strict=True)])
        return self.vocabulary.spread(scores.astype(mx.float32))


def read_medusa(folder: Path, spec: HeadSpec, arrays: Arrays, target: TargetParts) -> MedusaNetwork:
    names = {found[1]: name for name in arrays if (found := _MEDUSA_NAME.fullmatch(name))}
    blocks = Counter(int(name.split(".")[0]) for name in names if name.endswith("linear.weight"))
    n_blocks = [blocks[head] for head in range(len(blocks))]
    wanted = {f"{head}.{block}.linear.weight" for head, count in enumerate(n_blocks) for block in range(max(count, 1))}
    if not blocks or not wanted <= names.keys():
        raise InvalidModelFile("The file lacks residual blocks of its Medusa heads.", hint=HEAD_HINT)
    return MedusaNetwork(HeadWeights(arrays, names), n_blocks, target)


_HYDRA_PREFIX = "prefix_embeding_layer."
_HYDRA_LAYER = {
    **{name: f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"},
    **{name: f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "attention_norm": "layers.0.input_layernorm.weight",
    "ffn_norm": "layers.0.post_attention_layernorm.weight",
    "prefix_norm": "norm.weight",
}
_HYDRA_MATRIX = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.weight")
_HYDRA_OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(?:1\.)?weight")
# What the prefix layer has of its target if config.json does not say
_HYDRA_SETTINGS = ("num_attention_heads", "rms_norm_eps", "rope_theta", "rope_scaling", "max_position_embeddings")


class HydraNetwork(HeadNetwork):
    """Heads that read the tokens drafted before them (Ankner et al. 2024, arXiv:2402.05109).

    The state of a pair is the target's last hidden state, of Hydra++ after a layer over all of them. An output [1, k H]
    is a state, the embedding of its pair's token and those of the k - 2 tokens that were drafted after it: the input of
    head k - 2, counted from 0.
    """

    def __init__(
        self, n_blocks: Sequence[int], weights: HeadWeights, target: TargetParts, shape: LayerShape | None
    ) -> None:
        """`n_blocks` are the residual blocks of each head; `shape` is that of the layer of Hydra++.

        Raises InvalidModelFile, Unsupported for heads of another target.
        """
        size = self._size = target.hidden_size
        self._embed = target.embed
        self._prefix: HeadLayer | None = None
        if shape is not None:
            self.depth, self._prefix = 1, HeadLayer(weights, shape, size)
            self._prefix_norm = weights.vector("prefix_norm", size), shape.eps
        self._blocks: list[Blocks] = []
        self._outputs = []
        for head, count in enumerate(n_blocks):
            width = (2 + head) * size
            residual, first = (weights.linear(f"{head}.{name}", size, width) for name in ("residual", "0"))
            more = [(None, weights.linear(f"{head}.{block}", size, size)) for block in range(1, count)]
            self._blocks.append([(residual, first), *more])
            self._outputs.append(target.find_output(weights, size, f"{head}.output")[1])
        self.n_drafts = len(n_blocks)
        self._finish(weights, DraftVocabulary(None, target.vocab_size))

    def run(self, tokens: Any, states: Any, caches: Any) -> Any:
        """Output [n, width + H] of tokens [n] and states [n, width]: the target's, or an earlier output."""
        embedded = self._embed(tokens).astype(states.dtype)
        if self._prefix is not None and states.shape[-1] == self._size:
            states = mx.fast.rms_norm(self._prefix.run(states, caches[0], states), *self._prefix_norm)
        return mx.concatenate([states, embedded], axis=-1)

    def score(self, output: Any, n: int = 1) -> Any:
        """Logits [1, V] float32 of the head that reads as many embeddings as `output` has."""
        head = output.shape[-1] // self._size - 2
        scores = self._outputs[head](run_blocks(self._blocks[head], output))
        return self.vocabulary.spread(scores.astype(mx.float32))


def read_hydra(folder: Path, spec: HeadSpec, arrays: Arrays, target: TargetParts) -> HydraNetwork:
    """The Hydra heads in a folder. Some layers of Hydra++ have no weights, so that its blocks' numbers have gaps."""
    names = {f"{found[1]}.output": name for name in arrays if (found := _HYDRA_OUTPUT.fullmatch(name))}
    matrices = ((match, name) for name in arrays if (match := _HYDRA_MATRIX.fullmatch(name)))
    blocks = Counter[int]()
    for head, _, kind, name in sorted((int(match[1]), int(match[2]), match[3], name) for match, name in matrices):
        names[f"{head}.{blocks[head] if kind == 'linear' else 'residual'}"] = name
        blocks[head] += kind == "linear"
    n_blocks = [blocks[head] for head in range(len(blocks))]
    if not blocks or any(f"{head}.{part}" not in names for head in range(len(blocks)) for part in ("0", "residual")):
        raise InvalidModelFile("The file lacks blocks of Hydra heads that read the tokens before.", hint=HEAD_HINT)
    shape = None
    if any(name.startswith(_HYDRA_PREFIX) for name in arrays):
        names |= {neutral: _HYDRA_PREFIX + name for neutral, name in _HYDRA_LAYER.items()}
        if missing := [name for name in names.values() if name not in arrays]:
            raise InvalidModelFile(f"The Hydra++ head lacks the tensor {missing[0]}.", hint=HEAD_HINT)
        shape = read_layer_shape(folder, _find_settings(target.model, arrays, target.hidden_size))
    return HydraNetwork(n_blocks, HeadWeights(arrays, names), target, shape)


def _find_settings(model: Any, arrays: Arrays, size: int) -> dict[str, Any]:
    """What the prefix layer has if config.json does not say: the target's attention, and sizes of its tensors."""
    settings = {key: getattr(getattr(model, "args", None), key, None) for key in _HYDRA_SETTINGS}
    settings["hidden_size"] = size
    queries, keys = (arrays[_HYDRA_PREFIX + _HYDRA_LAYER[name]].shape[0] for name in "qk")
    if heads := settings["num_attention_heads"]:
        width = max(queries // heads, 1)
        settings |= {"head_dim": width, "num_key_value_heads": max(keys // width, 1)}
    return {key: value for key, value in settings.items() if value is not None}
