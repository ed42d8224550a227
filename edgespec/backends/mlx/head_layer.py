"""The transformer layer of a trained head on MLX: llama's, with what other families add to its attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope

from edgespec.backends.mlx.head_weights import HeadWeights
from edgespec.backends.mlx.keyvalues import KeyValues
from edgespec.errors import InvalidModelFile, reason_of
from edgespec.formats.head_tensors import HEAD_HINT
from edgespec.formats.mlx_folder import read_json

_MAX_SIZE = 2**24


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What config.json says of a layer.

    size     of its output
    inner    rows of the MLP's first matrices
    heads    of the queries, `kv_heads` of keys and values, with `head_dim` numbers each
    eps      of its norms
    rope     mlx-lm's module that rotates [1, heads, n, head_dim] from a position on
    """

    size: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: Any


def read_layer_shape(folder: Path, usual: Mapping[str, Any] | None = None) -> LayerShape:
    """Of the config in a head's folder; tables for a text model or a layer go before the keys outside.

    `usual` has what the config leaves out. Raises InvalidModelFile, CacheError.
    """
    config = {**(usual or {}), **read_json(folder / "config.json")}
    for key in ("text_config", "transformer_layer_config"):
        if isinstance(table := config.get(key), dict):
            config = {**config, **table}

    def integer(key: str, default: int | None = None) -> int:
        found = config.get(key)
        found = default if found is None else found
        if type(found) is not int or not 0 < found <= _MAX_SIZE:
            raise InvalidModelFile(
                f"{folder.name}/config.json describes no layer: its {key} is {found}.", hint=HEAD_HINT
            )
        return found

    size, heads = integer("hidden_size"), integer("num_attention_heads")
    head_dim = integer("head_dim", max(size // heads, 1))
    eps = config.get("rms_norm_eps", 1e-6)
    try:
        return LayerShape(
            size,
            integer("intermediate_size"),
            heads,
            integer("num_key_value_heads", heads),
            head_dim,
            float(eps),
            _make_rope(config, head_dim),
        )
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise InvalidModelFile(
            f"{folder.name}/config.json describes no layer: {reason_of(error)}.", hint=HEAD_HINT
        ) from error


def _make_rope(config: Mapping[str, Any], head_dim: int) -> Any:
    """Newer configs keep the settings of the rotation in a table of their own."""
    table = config.get("rope_parameters") or {}
    base = config.get("rope_theta") or table.get("rope_theta") or 10_000.0
    share = config.get("partial_rotary_factor") or table.get("partial_rotary_factor") or 1.0
    return initialize_rope(
        int(head_dim * share),
        float(base),
        config.get("rope_traditional") is True,
        config.get("rope_scaling") or table or None,
        config.get("max_position_embeddings"),
    )


class HeadLayer:
    """Attention and MLP, without the norm before the attention and without residuals.

    The tensors tell what the attention adds to llama's: biases, norms of queries and keys (Qwen3), a gate on its output
    (Qwen3-Next).
    """

    def __init__(
        self, weights: HeadWeights, shape: LayerShape, width: int, prefix: str = "", shift: float = 0.0
    ) -> None:
        """`width` of the attention's input; `prefix` of the tensors' neutral names; `shift` of the norms' weights.

        Raises InvalidModelFile for tensors of other shapes.
        """
        self._shape = shape
        heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self._is_gated = weights.rows(f"{prefix}q") == 2 * heads * head_dim
        self._q = weights.linear(f"{prefix}q", (1 + self._is_gated) * heads * head_dim, width)
        self._k = weights.linear(f"{prefix}k", kv_heads * head_dim, width)
        self._v = weights.linear(f"{prefix}v", kv_heads * head_dim, width)
        self._o = weights.linear(f"{prefix}o", shape.size, heads * head_dim)
        self._norms = {
            name: weights.vector(f"{prefix}{name}", head_dim, shift)
            for name in ("q_norm", "k_norm")
            if f"{prefix}{name}" in weights
        }
        self._ffn_norm = weights.vector(f"{prefix}ffn_norm", shape.size, shift)
        self._gate = weights.linear(f"{prefix}gate", shape.inner, shape.size)
        self._up = weights.linear(f"{prefix}up", shape.inner, shape.size)
        self._down = weights.linear(f"{prefix}down", shape.size, shape.inner)

    def attend(self, x: Any, cache: KeyValues) -> Any:
        """[n, size] of rows [n, width], which follow those in `cache`."""
        n, mask = len(x), cache.make_mask(len(x))
        queries, gate = self._q(x).reshape(1, n, self._shape.heads, -1), None
        if self._is_gated:
            queries, gate = mx.split(queries, 2, axis=-1)
        keys = self._k(x).reshape(1, n, self._shape.kv_heads, -1)
        values = self._v(x).reshape(1, n, self._shape.kv_heads, -1).transpose(0, 2, 1, 3)
        queries = self._rotate(self._norm(queries, "q_norm"), cache.offset)
        keys, values = cache.update_and_fetch(self._rotate(self._norm(keys, "k_norm"), cache.offset), values)
        y = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self._shape.head_dim**-0.5, mask=mask)
        y = y.transpose(0, 2, 1, 3).reshape(n, -1)
        return self._o(y if gate is None else y * mx.sigmoid(gate.reshape(n, -1)))

    def feed_forward(self, x: Any) -> Any:
        """[n, size] of rows [n, size], which are normed first."""
        y = mx.fast.rms_norm(x, self._ffn_norm, self._shape.eps)
        return self._down(nn.silu(self._gate(y)) * self._up(y))

    def _norm(self, x: Any, name: str) -> Any:
        return mx.fast.rms_norm(x, self._norms[name], self._shape.eps) if name in self._norms else x

    def _rotate(self, x: Any, position: Any) -> Any:
        return self._shape.rope(x.transpose(0, 2, 1, 3), offset=position)
