"""Draws a token from the distribution of every row on the device, by the rules of core.sampling.

The device computes in single precision. It decides a row only if no rounding can change the token; the host
computes the other rows from the logits. So equal logits and equal seeds give equal tokens on every runtime.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.core.sampling import SamplingParams

_BLOCK = 1024
_MARGIN = 2e-5  # of the total mass; float32 sums over 1,024 weights here and 512 on the host are off by less
_MAX_TOP_K = 1024  # the host applies a larger top-k


def can_draw(params: SamplingParams) -> bool:
    """Whether `draw` can apply these parameters.

    Not typical sampling, penalties or bias; and top-p only with top-k, since sorting a whole vocabulary costs more than
    it saves.
    """
    if params.temperature < 1e-3 or params.typical_p < 1 or params.has_penalties or params.logit_bias:
        return False
    return params.top_k <= _MAX_TOP_K and (params.top_k > 0 or params.top_p >= 1)


def draw(logits: Any, params: SamplingParams, uniforms: Any) -> tuple[Any, Any]:
    """Tokens [rows] int32 and whether each is certain [rows], for logits [rows, V] float32 and uniforms [rows]."""
    best = logits.max(axis=-1, keepdims=True)
    kept, is_certain = _truncate(logits, best, params)
    weights = mx.exp((logits - best) / np.float32(params.temperature))
    if kept is not None:
        weights = mx.where(kept, weights, 0)
    rows, size = weights.shape
    n_blocks = -(-size // _BLOCK)
    blocks = mx.pad(weights, [(0, 0), (0, n_blocks * _BLOCK - size)]).reshape(rows, n_blocks, _BLOCK)
    ends = mx.cumsum(blocks.sum(axis=-1), axis=-1)  # [rows, n_blocks]
    total = ends[:, -1:]
    level = uniforms[:, None] * total
    block = mx.minimum((ends <= level).sum(axis=-1, keepdims=True), n_blocks - 1)  # [rows, 1]
    before = mx.where(block > 0, mx.take_along_axis(ends, mx.maximum(block - 1, 0), axis=-1), 0)
    inside = before + mx.cumsum(mx.take_along_axis(blocks, block[..., None], axis=1)[:, 0], axis=-1)
    at = mx.minimum((inside <= level).sum(axis=-1, keepdims=True), _BLOCK - 1)
    upper = mx.take_along_axis(inside, at, axis=-1)
    lower = mx.where(at > 0, mx.take_along_axis(inside, mx.maximum(at - 1, 0), axis=-1), before)
    margin = _MARGIN * total
    is_clear = (upper - level > margin) & (level - lower > margin)
    return (block * _BLOCK + at)[:, 0].astype(mx.int32), is_certain & is_clear[:, 0] & mx.isfinite(total[:, 0])


def _truncate(logits: Any, best: Any, params: SamplingParams) -> tuple[Any, Any]:
    """[rows, V] which tokens the truncations leave (None: all), and [rows] where rounding cannot change that."""
    kept: Any = None
    is_certain = mx.ones(logits.shape[:1], mx.bool_)
    k = min(params.top_k, logits.shape[-1])
    if k:
        top = -mx.sort(-mx.topk(logits, k, axis=-1), axis=-1)  # [rows, k], best first
        kept = logits >= top[:, -1:]
        is_certain = kept.sum(axis=-1) == k  # no ties at the border
        if params.top_p < 1:
            border, is_clear = _nucleus(top, params.top_p)
            kept = kept & (logits >= border)
            is_certain = is_certain & is_clear
    if params.min_p > 0:
        enough = logits >= best + np.float32(math.log(params.min_p))
        kept = enough if kept is None else kept & enough
    return kept, is_certain


def _nucleus(top: Any, top_p: float) -> tuple[Any, Any]:
    """The smallest logit [rows, 1] in the nucleus of `top` [rows, k], and [rows] where rounding cannot change it."""
    weights = mx.exp(top - top[:, :1])
    sums = mx.cumsum(weights, axis=-1)
    mass, margin = top_p * sums[:, -1:], _MARGIN * sums[:, -1:]
    last = mx.minimum((sums < mass).sum(axis=-1, keepdims=True), top.shape[-1] - 1)
    border, least = (mx.take_along_axis(x, last, axis=-1) for x in (top, weights))
    # The host sorts by weight, then by id, and may order weights that differ by a rounding error in another way.
    alone = (mx.abs(weights - least) <= 1e-6 * least).sum(axis=-1) == 1
    is_clear = (mx.abs(sums - mass) > margin).all(axis=-1) & alone
    return border, is_clear
