"""The network of DFlash heads: layers that fill a block of masks in one forward over the target's hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.mlx.draft_vocabulary import DraftVocabulary, OneMatrix
from edgespec.backends.mlx.forward_context import ForwardContext
from edgespec.backends.mlx.head_layer import HeadLayer, LayerShape, read_layer_shape
from edgespec.backends.mlx.head_weights import HeadWeights, read_arrays
from edgespec.backends.mlx.keyvalues import KeyValues
from edgespec.backends.mlx.target_parts import OTHER_HEAD, TargetParts, read_target
from edgespec.errors import InvalidModelFile
from edgespec.formats.head_tensors import HEAD_HINT, dflash_names, read_draft_ids
from edgespec.formats.heads import HeadSpec
from edgespec.formats.mlx_folder import read_json

_MAX_BLOCK = 64  # positions; the target scores no more rows in one forward
_PLAIN: Mapping[str, tuple[object, ...]] = {  # what a config may say where nothing else is computed
    "hidden_act": ("silu",),
    "rope_is_neox_style": (True,),
    "attention_value_scale": (1,),
    "input_embedding_scale": (1,),
    "markov_head_type": ("vanilla",),
}


class BlockKeys(KeyValues):
    """Keys and values of one layer, where the rows of a block attend to each other in both directions.

    Positions before a window are kept, and masked.
    """

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


class BlockLayer(HeadLayer):
    """A layer that reads hidden states as keys and values, and a block as rows."""

    def __init__(self, weights: HeadWeights, shape: LayerShape, index: int) -> None:
        """Raises InvalidModelFile for tensors of other shapes."""
        super().__init__(weights, shape, shape.size, f"{index}.")
        self._attention_norm = weights.vector(f"{index}.attention_norm", shape.size)

    def inject(self, z: Any, cache: KeyValues) -> None:
        """Append the keys and values of fused hidden states `z` [n, size] to `cache`."""
        split = 1, len(z), self._shape.kv_heads, -1
        keys = self._rotate(self._norm(self._k(z).reshape(split), "k_norm"), cache.offset)
        cache.update_and_fetch(keys, self._v(z).reshape(split).transpose(0, 2, 1, 3))

    def run(self, x: Any, cache: KeyValues) -> Any:
        """[n, size] of the rows [n, size] of a block, which follow those in `cache`."""
        x = x + self.attend(mx.fast.rms_norm(x, self._attention_norm, self._shape.eps), cache)
        return x + self.feed_forward(x)


@dataclass(frozen=True, slots=True)
class Block:
    """What is run after the root.

    n_rows      the root and masks
    first_row   that predicts, the token after the root: 0 or 1
    mask_token  the id of a mask
    windows     [layers] the positions that a row attends to; None for all
    is_causal   whether a row attends to none of the later ones
    """

    n_rows: int
    first_row: int
    mask_token: int
    windows: Sequence[int | None]
    is_causal: bool

    @property
    def n_drafts(self) -> int:
        """The tokens that a block drafts."""
        return self.n_rows - self.first_row


class DFlashNetwork(OneMatrix):
    """A head beside its target, whose embeddings and output matrix serve where it has none of its own.

    H is the hidden size of both, V the target's vocabulary size, W the draft's.
    """

    def __init__(self, spec: HeadSpec, folder: Path, target: TargetParts) -> None:
        """Reads a folder with config.json and safetensors.

        Raises InvalidModelFile, CacheError, BackendError; Unsupported for a head that the target does not fit.
        """
        target.check(spec)
        self.layers = spec.layers or ()
        arrays = read_arrays(folder)
        weights, shape, size = HeadWeights(arrays, dflash_names(arrays)), read_layer_shape(folder), target.hidden_size
        self._eps = shape.eps
        self._fc = weights.linear("fc", size, len(self.layers) * size)
        self._norms = [weights.vector(name, size) for name in ("feature_norm", "output_norm")]
        count = next(i for i in range(len(arrays)) if f"{i}.q" not in weights)
        self._layers = [BlockLayer(weights, shape, i) for i in range(count)]
        self.block = _read_block(spec, folder, target.vocab_size, count)
        self.vocabulary = _read_vocabulary(weights, target.vocab_size)
        self._embed = target.find_embedding(weights, size)
        self._output = target.score
        if "output" in weights:
            self._output = weights.linear("output", self.vocabulary.size, size)
        self._read_more(weights)
        weights.load()
        self.nbytes = weights.nbytes

    def open_caches(self) -> list[KeyValues]:
        """Keys and values of each layer, of no positions."""
        return [BlockKeys(window, is_causal=self.block.is_causal) for window in self.block.windows]

    def inject(self, features: Any, caches: list[KeyValues]) -> None:
        """Append what stands for the target's `features` [n, layers * H] to `caches`; the device starts on it."""
        z = mx.fast.rms_norm(self._fc(features.astype(self._norms[0].dtype)), self._norms[0], self._eps)
        for layer, cache in zip(self._layers, caches, strict=True):
            layer.inject(z, cache)
        mx.async_eval([cache.state for cache in caches])

    def run_block(self, root: int, caches: list[KeyValues]) -> Any:
        """Output [n_drafts, H], normed, of the rows that predict; none is kept.

        All rows of a block run, as in training: since they attend to each other, fewer of them would say other things.
        """
        held, masks = caches[0].length, [self.block.mask_token] * (self.block.n_rows - 1)
        x = self._embed(mx.array([root, *masks], mx.int32)).astype(self._norms[0].dtype)
        try:
            for layer, cache in zip(self._layers, caches, strict=True):
                x = layer.run(x, cache)
        finally:
            for cache in caches:
                cache.trim_to(held)
        return mx.fast.rms_norm(x[self.block.first_row :], self._norms[1], self._eps)

    def score(self, output: Any) -> Any:
        """Scores [n, W] float32 of the draft's tokens."""
        return self._output(output).astype(mx.float32)

    def _read_more(self, weights: HeadWeights) -> None:
        """Take what other kinds of heads have besides."""


def read_network(folder: Path, spec: HeadSpec, target: Any) -> DFlashNetwork:
    """The head in a folder for mlx-lm's model `target`. Raises as DFlashNetwork."""
    return DFlashNetwork(spec, folder, read_target(target))


def _read_vocabulary(weights: HeadWeights, vocab_size: int) -> DraftVocabulary:
    """Raises InvalidModelFile, Unsupported."""
    rows, ids = weights.rows("output") if "output" in weights else vocab_size, None
    if "d2t" in weights:
        ids = mx.array(read_draft_ids(np.array(weights.table("d2t")), vocab_size)[0])
    if rows != (vocab_size if ids is None else ids.size):
        raise Unsupported(
            f"the head scores {rows:,} tokens and does not name them in the vocabulary of {vocab_size:,}.",
            hint=OTHER_HEAD,
        )
    return DraftVocabulary(ids, vocab_size)


def _read_block(spec: HeadSpec, folder: Path, vocab_size: int, count: int) -> Block:
    """Raises Unsupported for a head without masks, or with blocks that are too long; and as _read_attention."""
    if spec.mask_token is None or spec.mask_token >= vocab_size:
        named = "none" if spec.mask_token is None else f"{spec.mask_token:,} of {vocab_size:,}"
        raise Unsupported(
            f"the head fills its blocks with a token of the model, and its config.json names {named}.", hint=OTHER_HEAD
        )
    if not 2 <= spec.block_size <= _MAX_BLOCK:
        raise Unsupported(
            f"the head has blocks of {spec.block_size:,} positions; those of 2 to {_MAX_BLOCK} are run.",
            hint=OTHER_HEAD,
        )
    windows, is_causal = _read_attention(folder, count)
    return Block(spec.block_size, 0 if spec.predicts_at_root else 1, spec.mask_token, windows, is_causal)


def _read_attention(folder: Path, count: int) -> tuple[list[int | None], bool]:
    """The windows and `is_causal` of a Block with `count` layers, as config.json has them.

    A window without `use_sliding_window` or `use_swa` means nothing. Raises InvalidModelFile, CacheError; Unsupported
    for layers that compute something else.
    """
    config = read_json(folder / "config.json")
    for key in ("transformer_layer_config", "dflash_config"):
        if isinstance(table := config.get(key), dict):
            config = {**config, **table}
    for key, allowed in _PLAIN.items():
        if (value := config.get(key)) is not None and value not in allowed:
            raise Unsupported(f"no head is run whose config.json says {key} = {str(value)[:40]}.", hint=OTHER_HEAD)
    if (stated := config.get("num_hidden_layers", count)) != count:
        raise InvalidModelFile(f"The head has {count} layers, its config.json names {stated}.", hint=HEAD_HINT)
    causal = config.get("is_causal", config.get("causal")) is True
    window = config.get("swa_window_size") or config.get("sliding_window")
    everywhere, kinds = config.get("use_swa") is True, config.get("layer_types")
    if not (everywhere or config.get("use_sliding_window") is True) or type(window) is not int or window < 1:
        return [None] * count, causal
    if everywhere:
        return [window] * count, causal
    if not isinstance(kinds, list) or len(kinds) != count:
        raise InvalidModelFile("The head's config.json has a window and not a type for each layer.", hint=HEAD_HINT)
    return [window if kind == "sliding_attention" else None for kind in kinds], causal
