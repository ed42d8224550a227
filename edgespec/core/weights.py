"""Sums of weights, and the index at a share of their sum."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgespec.core.arrays import Probs

_BLOCK = 512
_EXACT = 16_384  # weights that are summed in float64 throughout


def index_at(weights: Probs, u: float) -> int:
    """Inverse of the cumulative distribution: the first i whose running sum exceeds u times the total.

    Never returns an index of weight zero. See `sum_blocks` for the precision of the running sums.
    """
    n = len(weights)
    start, before = 0, 0.0
    if n <= _BLOCK:
        inside = np.cumsum(weights, dtype=np.float64)
        level = u * inside[-1]
    else:
        blocks = np.cumsum(sum_blocks(weights))
        level = u * blocks[-1]
        b = min(int(blocks.searchsorted(level, side="right")), len(blocks) - 1)
        start, before = b * _BLOCK, blocks[b - 1] if b else 0.0
        inside = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    i = start + int(inside.searchsorted(level - before, side="right"))
    if i < n and weights[i] > 0:
        return i
    below = np.flatnonzero(weights[:i])  # rounding at a border: the nearest index below with a weight
    return int(below[-1]) if len(below) else int(np.flatnonzero(weights)[0])


def sum_blocks(weights: Probs) -> npt.NDArray[np.float64]:
    """[ceil(n / 512)] the sums of blocks of 512 weights; the last block may be shorter.

    Up to 16,384 weights are summed in float64. Blocks of more are summed in the type of the weights, which is off by
    less than 1e-6 of the sum for 512 float32 weights.
    """
    whole = len(weights) // _BLOCK * _BLOCK
    rows, rest = weights[:whole].reshape(-1, _BLOCK), weights[whole:]
    sums = np.einsum("ij->i", rows, dtype=np.float64 if len(weights) <= _EXACT else weights.dtype).astype(np.float64)
    return np.append(sums, rest.sum(dtype=np.float64)) if len(rest) else sums
