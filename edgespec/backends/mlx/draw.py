"""Drawing from every row's law on the device, by the rule of `core.sampling` and `core.random_source.index_at`.

The device works in single precision. A row is decided here only where no rounding could change the token; else the host
computes it from the logits. So equal logits and equal seeds give equal tokens on every runtime.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.core.sampling import SamplingParams

_BLOCK = 1024
_MARGIN = 2e-5  # of the total mass; a float32 sum over 1,024 weights is off by less
_MOST_KEPT = 1024  # top-k beyond this is left to the host


def can_draw(params: SamplingParams) -> bool:
    """Whether `draw` knows these parameters: top-p needs a top-k, for sorting a whole vocabulary costs more than it
    saves; typical sampling, penalties and bias are the host's."""
    cuts = params.top_p < 1
    if params.temperature < 1e-3 or params.typical_p < 1 or params.has_penalties or params.logit_bias:
        return False
    return params.top_k <= _MOST_KEPT and not (cuts and not params.top_k)


def draw(logits: Any, params: SamplingParams, uniforms: Any) -> tuple[Any, Any]:
    """Tokens [rows] int32 and whether each is certain [rows], of logits [rows, V] float32 and uniforms [rows]."""
    best = logits.max(axis=-1, keepdims=True)
    kept, sure = _kept(logits, best, params)
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
    clear = (upper - level > margin) & (level - lower > margin)
    return (block * _BLOCK + at)[:, 0].astype(mx.int32), sure & clear[:, 0] & mx.isfinite(total[:, 0])


def _kept(logits: Any, best: Any, params: SamplingParams) -> tuple[Any, Any]:
    """Which tokens the truncations leave [rows, V] (None: all), and in which rows that is beyond doubt [rows]."""
    kept: Any = None
    sure = mx.ones(logits.shape[:1], mx.bool_)
    k = min(params.top_k, logits.shape[-1])
    if k:
        top = -mx.sort(-mx.topk(logits, k, axis=-1), axis=-1)  # [rows, k], best first
        kept = logits >= top[:, -1:]
        sure = kept.sum(axis=-1) == k  # else there are ties at the border
        if params.top_p < 1:
            border, clear = _nucleus(top, params.top_p)
            kept = kept & (logits >= border)
            sure = sure & clear
    if params.min_p > 0:
        enough = logits >= best + np.float32(math.log(params.min_p))
        kept = enough if kept is None else kept & enough
    return kept, sure


def _nucleus(top: Any, top_p: float) -> tuple[Any, Any]:
    """The smallest logit [rows, 1] of the nucleus of `top` [rows, k], and where it is beyond doubt [rows]."""
    weights = mx.exp(top - top[:, :1])
    sums = mx.cumsum(weights, axis=-1)
    mass, margin = top_p * sums[:, -1:], _MARGIN * sums[:, -1:]
    last = mx.minimum((sums < mass).sum(axis=-1, keepdims=True), top.shape[-1] - 1)
    border, least = (mx.take_along_axis(x, last, axis=-1) for x in (top, weights))
    # Weights a rounding apart: the host, which goes by weight and then by id, might have them in another order.
    alone = (mx.abs(weights - least) <= 1e-6 * least).sum(axis=-1) == 1
    clear = (mx.abs(sums - mass) > margin).all(axis=-1) & alone
    return border, clear
