"""Medusa and Hydra heads on MLX: several small networks over one hidden state, each for a later token."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from edgespec.backends.mlx.draft_vocabulary import DraftVocabulary
from edgespec.backends.mlx.head_parts import (
    HeadLayer,
    HeadWeights,
    LayerShape,
    TargetParts,
    read_layer_shape,
)
from edgespec.backends.mlx.head_session import HeadNetwork
from edgespec.errors import InvalidModelFile
from edgespec.formats.heads import HEAD_HINT, HeadSpec

# HEAD.LAYER.linear.weight of a residual block, HEAD.LAYER.weight of an output matrix behind the blocks
_NAME = re.compile(r"(?:medusa_heads?\.)?(\d+\.\d+\.(?:linear\.)?weight)")


class MedusaNetwork(HeadNetwork):
    """Independent heads (Cai et al. 2024, arXiv:2401.10774): each guesses a later token from the target's state."""

    reads_pairs = False

    def __init__(self, weights: HeadWeights, n_blocks: Sequence[int], target: TargetParts) -> None:
        """`n_blocks` are the residual blocks of each head. A head without an output matrix uses the target's.

        Raises InvalidModelFile for tensors of other shapes, Unsupported for heads of another vocabulary.
        """
        size = target.hidden_size
        self._blocks = [
            [weights.linear(f"{head}.{block}.linear.weight", size, size) for block in range(count)]
            for head, count in enumerate(n_blocks)
        ]
        self._outputs = [
            target.find_output(weights, size, f"{head}.{count}.weight") for head, count in enumerate(n_blocks)
        ]
        self.n_drafts = len(n_blocks)
        self._finish(weights, DraftVocabulary(None, target.vocab_size))

    def run(self, tokens: Any, states: Any, caches: Any) -> Any:
        return states

    def score(self, output: Any, n: int = 1) -> Any:
        """Logits [n, V] float32 of the first `n` heads for a state [1, H]."""
        rows = []
        for blocks in self._blocks[:n]:
            rows.append(output)
            for linear in blocks:
                rows[-1] = rows[-1] + nn.silu(linear(rows[-1]))
        outputs = self._outputs[: len(rows)]
        if all(each is outputs[0] for each in outputs):
            scores = outputs[0](mx.concatenate(rows))
        else:
            scores = mx.concatenate([score(row) for score, row in zip(outputs, rows, strict=True)])
        return self.vocabulary.spread(scores.astype(mx.float32))


def read_medusa(folder: Path, spec: HeadSpec, arrays: Mapping[str, Any], target: TargetParts) -> MedusaNetwork:
    """The Medusa heads in a folder."""
    names = {found[1]: name for name in arrays if (found := _NAME.fullmatch(name))}
    blocks = [name.split(".")[:2] for name in names if name.endswith("linear.weight")]
    return MedusaNetwork(
        HeadWeights(arrays, names), _count_blocks(blocks, "residual blocks of its Medusa heads"), target
    )


def _count_blocks(found: Sequence[Sequence[str]], what: str) -> list[int]:
    """The number of blocks of each head, of (head, block). Raises InvalidModelFile where one is missing."""
    blocks = {(int(head), int(block)) for head, block in found}
    heads = range(len({head for head, _ in blocks}))
    counts = [sum(each == head for each, _ in blocks) for head in heads]
    if not blocks or blocks != {(head, block) for head in heads for block in range(counts[head])}:
        raise InvalidModelFile(f"The file lacks {what}.", hint=HEAD_HINT)
    return counts


_PREFIX = "prefix_embeding_layer."
_PREFIX_NAMES = {
    **{name: f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"},
    **{name: f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "attention_norm": "layers.0.input_layernorm.weight",
    "ffn_norm": "layers.0.post_attention_layernorm.weight",
    "prefix_norm": "norm.weight",
}
_MATRIX = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.weight")
_OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(?:1\.)?weight")
# What the prefix layer has of its target where config.json does not say
_SETTINGS = ("num_attention_heads", "rms_norm_eps", "rope_theta", "rope_scaling", "max_position_embeddings")


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

        Raises InvalidModelFile for tensors of other shapes, Unsupported for heads of another vocabulary.
        """
        size = self._size = target.hidden_size
        self._embed = target.embed
        self._prefix: HeadLayer | None = None
        if shape is not None:
            self.depth, self._prefix = 1, HeadLayer(weights, shape, size)
            self._prefix_norm = weights.vector("prefix_norm", size), shape.eps
        self._heads, self._outputs = [], []
        for head, count in enumerate(n_blocks):
            width = (2 + head) * size
            residual, first = (weights.linear(f"{head}.{name}", size, width) for name in ("residual", "0"))
            more = [weights.linear(f"{head}.{block}", size, size) for block in range(1, count)]
            self._heads.append((residual, first, more))
            self._outputs.append(target.find_output(weights, size, f"{head}.output"))
        self.n_drafts = len(n_blocks)
        self._finish(weights, DraftVocabulary(None, target.vocab_size))

    def run(self, tokens: Any, states: Any, caches: Any) -> Any:
        """Output [n, width + H] of tokens [n] and states [n, width]: the target's, or an earlier output."""
        embedded = self._embed(tokens).astype(states.dtype)
        if self._prefix is not None and states.shape[-1] == self._size:
            states = mx.fast.rms_norm(self._prefix.run(states, caches[0], states), *self._prefix_norm)
        return mx.concatenate([states, embedded], axis=-1)

    def score(self, output: Any, n: int = 1) -> Any:
        """Logits [1, V] float32 of the head that reads so many embeddings."""
        head = output.shape[-1] // self._size - 2
        residual, first, more = self._heads[head]
        x = residual(output) + nn.silu(first(output))
        for linear in more:
            x = x + nn.silu(linear(x))
        return self.vocabulary.spread(self._outputs[head](x).astype(mx.float32))


def read_hydra(folder: Path, spec: HeadSpec, arrays: Mapping[str, Any], target: TargetParts) -> HydraNetwork:
    """The Hydra heads in a folder."""
    names = dict(_find_names(arrays))
    parts = [name.split(".") for name in names]
    lacking = "blocks of Hydra heads that read the tokens before"
    n_blocks = _count_blocks([part for part in parts if part[1].isdigit()], lacking)
    if {head for head, _ in parts} != {head for head, part in parts if part == "residual"}:
        raise InvalidModelFile(f"The file lacks {lacking}.", hint=HEAD_HINT)
    shape = None
    if any(name.startswith(_PREFIX) for name in arrays):
        names |= {neutral: _PREFIX + name for neutral, name in _PREFIX_NAMES.items()}
        if missing := [name for name in names.values() if name not in arrays]:
            raise InvalidModelFile(f"The Hydra++ head lacks the tensor {missing[0]}.", hint=HEAD_HINT)
        shape = read_layer_shape(folder, _find_settings(target.model, arrays, target.hidden_size))
    return HydraNetwork(n_blocks, HeadWeights(arrays, names), target, shape)


def _find_names(arrays: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(neutral name, the file's own) of matrices: HEAD.BLOCK, HEAD.residual of the first block, HEAD.output.

    Layers without weights lie between the blocks of Hydra++, so that its blocks are not numbered in steps of one.
    """
    found = [(match, name) for name in arrays if (match := _MATRIX.fullmatch(name))]
    blocks = sorted((int(match[1]), int(match[2]), name) for match, name in found if match[3] == "linear")
    for head, block, name in blocks:
        yield f"{head}.{sum(each[0] == head and each[1] < block for each in blocks)}", name
    for match, name in found:
        if match[3] == "res_connection":
            yield f"{match[1]}.residual", name
    for name in arrays:
        if output := _OUTPUT.fullmatch(name):
            yield f"{output[1]}.output", name


def _find_settings(model: Any, arrays: Mapping[str, Any], size: int) -> dict[str, Any]:
    """What the prefix layer has where config.json does not say: the target's attention, and sizes of its tensors."""
    settings = {key: getattr(getattr(model, "args", None), key, None) for key in _SETTINGS}
    settings |= {"hidden_size": size, "intermediate_size": arrays[_PREFIX + _PREFIX_NAMES["gate"]].shape[0]}
    queries, keys = (arrays[_PREFIX + _PREFIX_NAMES[name]].shape[0] for name in "qk")
    if heads := settings["num_attention_heads"]:
        width = max(queries // heads, 1)
        settings |= {"head_dim": width, "num_key_value_heads": max(keys // width, 1)}
    return {key: value for key, value in settings.items() if value is not None}
