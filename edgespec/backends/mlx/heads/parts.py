"""The transformer layer of a trained head on MLX: llama's, with what other families add to its attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.models.switch_layers import SwitchGLU

from edgespec.backends.mlx.caches import KeyValues
from edgespec.backends.mlx.heads.weights import HeadWeights
from edgespec.errors import InvalidModelFile, reason_of
from edgespec.formats.heads import HEAD_HINT
from edgespec.formats.mlx_folder import read_json

_MAX_SIZE = 2**24


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What config.json says of a layer.

    size       of its output
    heads      of the queries, `kv_heads` of keys and values, with `head_dim` numbers each
    eps        of its norms
    rope       mlx-lm's module that rotates [1, heads, n, head_dim] from a position on
    n_active   experts of a mixture that see a token; 1 if the config names none
    is_scaled  whether the weights of these experts are scaled to a sum of 1
    """

    size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: Any
    n_active: int
    is_scaled: bool


def read_layer_shape(folder: Path, usual: Mapping[str, Any] | None = None) -> LayerShape:
    """Reads the config in a head's folder; `usual` has what it leaves out. Raises InvalidModelFile, CacheError."""
    return make_layer_shape({**(usual or {}), **read_head_config(folder)}, f"{folder.name}/config.json")


def make_layer_shape(config: Mapping[str, Any], name: str) -> LayerShape:
    """The shape that a config states; `name` is that of its file. Raises InvalidModelFile."""
    try:
        size, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or size // heads
        kv_heads, n_active = config.get("num_key_value_heads") or heads, config.get("num_experts_per_tok") or 1
        if not all(type(n) is int and 0 < n <= _MAX_SIZE for n in (size, heads, head_dim, kv_heads, n_active)):
            raise ValueError(f"{heads} heads of {head_dim} numbers, {size} in all")
        eps, rope = float(config.get("rms_norm_eps", 1e-6)), _make_rope(config, head_dim)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise InvalidModelFile(f"{name} describes no layer: {reason_of(error)}.", hint=HEAD_HINT) from error
    return LayerShape(size, heads, kv_heads, head_dim, eps, rope, n_active, config.get("norm_topk_prob") is not False)


def read_head_config(folder: Path) -> dict[str, Any]:
    """The config of a head; tables for a text model or a layer go first. Raises InvalidModelFile, CacheError."""
    config = read_json(folder / "config.json")
    for key in ("text_config", "transformer_layer_config", "dflash_config"):
        if isinstance(table := config.get(key), dict):
            config = {**config, **table}
    return config


def _make_rope(config: Mapping[str, Any], head_dim: int) -> Any:
    """The rotary embedding that a config states. Newer configs keep its settings in a table of their own."""
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


class Mlp:
    """Llama's feed-forward part."""

    def __init__(self, weights: HeadWeights, shape: LayerShape, prefix: str) -> None:
        """Raises InvalidModelFile for tensors of other shapes."""
        inner = weights.shape(f"{prefix}gate")[0]
        self._gate = weights.linear(f"{prefix}gate", inner, shape.size)
        self._up = weights.linear(f"{prefix}up", inner, shape.size)
        self._down = weights.linear(f"{prefix}down", shape.size, inner)

    def __call__(self, x: Any) -> Any:
        return self._down(nn.silu(self._gate(x)) * self._up(x))


class ExpertMlp:
    """Qwen's mixture of experts, with one that sees all tokens if the file has it."""

    def __init__(self, weights: HeadWeights, shape: LayerShape, prefix: str) -> None:
        """Raises InvalidModelFile for tensors of other shapes."""
        self._shape = shape
        count, inner = weights.shape(f"{prefix}router")[0], weights.shape(f"{prefix}gate")[-2]
        if count < shape.n_active:
            raise InvalidModelFile(f"The head has {count} experts, and a token {shape.n_active}.", hint=HEAD_HINT)
        self._router = weights.linear(f"{prefix}router", count, shape.size)
        self._experts = SwitchGLU(shape.size, inner, count)
        self._experts.gate_proj = weights.experts(f"{prefix}gate", (count, inner, shape.size))
        self._experts.up_proj = weights.experts(f"{prefix}up", (count, inner, shape.size))
        self._experts.down_proj = weights.experts(f"{prefix}down", (count, shape.size, inner))
        has_shared = f"{prefix}shared_router" in weights
        self._shared = Mlp(weights, shape, f"{prefix}shared_") if has_shared else None
        self._shared_gate: Any = weights.linear(f"{prefix}shared_router", 1, shape.size) if has_shared else None

    def __call__(self, x: Any) -> Any:
        share = mx.softmax(self._router(x), axis=-1, precise=True)
        chosen = mx.argpartition(share, kth=-self._shape.n_active, axis=-1)[..., -self._shape.n_active :]
        share = mx.take_along_axis(share, chosen, axis=-1)
        if self._shape.is_scaled:
            share = share / share.sum(axis=-1, keepdims=True)
        y = (self._experts(x, chosen) * share[..., None]).sum(axis=-2)
        return y if self._shared is None else y + mx.sigmoid(self._shared_gate(x)) * self._shared(x)


class HeadLayer:
    """A layer of llama, with what its tensors add: biases, norms of queries and keys (Qwen3), a gate (Qwen3-Next)."""

    def __init__(
        self, weights: HeadWeights, shape: LayerShape, width: int, prefix: str = "", shift: float = 0.0
    ) -> None:
        """`width`: of the attention's input; `shift`: of the norms' weights. Raises InvalidModelFile."""
        self._shape = shape
        heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self._is_gated = weights.shape(f"{prefix}q")[0] == 2 * heads * head_dim
        self._q = weights.linear(f"{prefix}q", (1 + self._is_gated) * heads * head_dim, width)
        self._k = weights.linear(f"{prefix}k", kv_heads * head_dim, width)
        self._v = weights.linear(f"{prefix}v", kv_heads * head_dim, width)
        self._o = weights.linear(f"{prefix}o", shape.size, heads * head_dim)
        sizes = {"attention_norm": width, "ffn_norm": shape.size, "q_norm": head_dim, "k_norm": head_dim}
        self._norms = {
            name: weights.vector(f"{prefix}{name}", size, shift)
            for name, size in sizes.items()
            if f"{prefix}{name}" in weights
        }
        kind = ExpertMlp if f"{prefix}router" in weights else Mlp
        self._mlp = kind(weights, shape, prefix)

    def run(self, x: Any, cache: KeyValues, residual: Any) -> Any:
        """The output [n, size] for rows `x` [n, width], which follow those in `cache`.

        `residual` [n, size] is what the attention is added to.
        """
        h = residual + self._attend(self._norm(x, "attention_norm"), cache)
        return h + self._mlp(self._norm(h, "ffn_norm"))

    def inject(self, states: Any, cache: KeyValues) -> None:
        cache.update_and_fetch(*self._keys_and_values(states, cache))

    def _keys_and_values(self, x: Any, cache: KeyValues) -> tuple[Any, Any]:
        split = 1, len(x), self._shape.kv_heads, -1
        keys = self._rotate(self._norm(self._k(x).reshape(split), "k_norm"), cache.offset)
        return keys, self._v(x).reshape(split).transpose(0, 2, 1, 3)

    def _attend(self, x: Any, cache: KeyValues) -> Any:
        n, mask = len(x), cache.make_mask(len(x))
        queries, gate = self._q(x).reshape(1, n, self._shape.heads, -1), None
        if self._is_gated:
            queries, gate = mx.split(queries, 2, axis=-1)
        queries = self._rotate(self._norm(queries, "q_norm"), cache.offset)
        keys, values = cache.update_and_fetch(*self._keys_and_values(x, cache))
        y = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self._shape.head_dim**-0.5, mask=mask)
        y = y.transpose(0, 2, 1, 3).reshape(n, -1)
        return self._o(y if gate is None else y * mx.sigmoid(gate.reshape(n, -1)))

    def _norm(self, x: Any, name: str) -> Any:
        return mx.fast.rms_norm(x, self._norms[name], self._shape.eps) if name in self._norms else x

    def _rotate(self, x: Any, position: Any) -> Any:
        return self._shape.rope(x.transpose(0, 2, 1, 3), offset=position)
