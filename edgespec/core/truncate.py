"""Truncation of a distribution: top-k, nucleus, typical and min-p.

Of equal values the lower id stays. The truncations run on every visited row, so none sorts a vocabulary: a bound that a
pass or two over the row can give leaves few candidates, and only the candidates at the border are sorted.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from edgespec.core.arrays import Indices, Logits, Probs
from edgespec.core.weights import sum_blocks
from edgespec.errors import BackendError

_ROWS = 64  # rows that a vocabulary is folded into; the maxima of its columns bound the k-th largest value
_LOWEST = np.finfo(np.float32).min
_SLACK = 1e-6  # share of the total mass; the errors of float32 sums and weights are below it
_LEAST_TOTAL = 1e-13  # of exp(z) without subtracting the maximum: the terms that matter are no denormal floats then
_SAMPLE = 512
_SAFE_SHARE = 0.75  # part of the mass that may be left out; the sample's border leaves out that much, by estimate
_MANY = 50  # a mask with more than one hit in so many is slow to read
_FEW = 1024  # entries, which are sorted directly
_BUCKET_BITS = 18  # low bits of a float32 that are ignored; the rest gives 32 buckets for every power of two


class NonFiniteLogits(BackendError):
    """A row of logits whose maximum is NaN or infinite."""


def non_finite_error() -> NonFiniteLogits:
    return NonFiniteLogits("the model returned NaN or infinite logits.", hint="Check the file: edgespec pull --verify.")


def highest(z: Logits) -> np.float32:
    """The maximum. Raises BackendError if it is NaN or infinite, as do all functions here."""
    best: np.float32 = z.max()
    if not math.isfinite(best):
        raise non_finite_error()
    return best


def top_k(z: Logits, k: int) -> Indices:
    """The ids of the k largest values, ascending; fewer than k if the others are -inf."""
    width = len(z) // _ROWS
    if k <= width:  # the k largest column maxima are k values of z, so the k largest values reach the least of them
        columns = z[: _ROWS * width].reshape(_ROWS, width).max(axis=0)
        highest(np.append(z[_ROWS * width :], columns.max()))
        columns.partition(width - k)
        border = max(columns[width - k], _LOWEST)
    else:
        highest(z)
        border = _LOWEST
    likely: Indices = (z >= border).nonzero()[0]
    if len(likely) <= k:
        return likely
    values = z[likely]
    if len(values) <= _FEW:
        return likely[np.sort(np.argsort(-values, kind="stable")[:k])]
    border = np.partition(values, len(values) - k)[len(values) - k]
    above = np.flatnonzero(values > border)
    equal = np.flatnonzero(values == border)[: k - len(above)]
    return likely[np.sort(np.concatenate((above, equal)))]


def nucleus(z: Logits, top_p: float) -> Indices:
    """Nucleus sampling (Holtzman et al. 2020): the fewest most probable ids with `top_p` mass, ascending."""
    if len(z) <= _FEW:
        weights = np.exp(z - highest(z))
        order = np.argsort(-z, kind="stable")
        sums = np.cumsum(weights[order], dtype=np.float64)
        return np.sort(order[: int(sums.searchsorted(top_p * sums[-1])) + 1])
    with np.errstate(over="ignore"):
        weights = np.exp(z)
    total = float(sum_blocks(weights).sum())
    if not _LEAST_TOTAL < total < math.inf:  # out of range, or NaN
        weights = np.exp(z - highest(z))
        total = float(sum_blocks(weights).sum())
    likely, weights = _find_nucleus(weights, total, top_p * total)
    rank = weights.max().view(np.int32) - weights.view(np.int32)  # bits of positive floats have the order of the floats
    return likely[_shortest(rank, weights, top_p * total)]


def typical(z: Logits, typical_p: float) -> Indices:
    """Locally typical sampling (Meister et al. 2022): the ids, ascending, whose surprise is nearest to the entropy.

    They are the fewest of these with `typical_p` mass.
    """
    x = np.maximum(z - highest(z), _LOWEST)  # 0 * -inf is NaN
    weights = np.exp(x)
    total = float(sum_blocks(weights).sum())
    # The entropy is log(total) - mean, and the surprise of an id log(total) - x.
    mean = np.float32(np.multiply(weights, x).sum(dtype=np.float64) / total)
    distance = np.abs(np.subtract(mean, x, out=x), out=x)
    return _shortest(distance.view(np.int32), weights, typical_p * total)


def min_p(z: Logits, least: float) -> Indices:
    """The ids at least `least` times as probable as the best one, ascending."""
    kept: Indices = (z >= highest(z) + np.float32(math.log(least))).nonzero()[0]
    return kept


def _shortest(rank: npt.NDArray[np.int32], weights: Probs, mass: float) -> Indices:
    """The ascending indices of the first entries by (rank, index), the fewest that have `mass` in all; at least one."""
    if len(rank) <= _FEW:
        return np.sort(_start(np.argsort(rank, kind="stable"), weights, mass))
    bucket = rank >> _BUCKET_BITS
    sums = np.cumsum(np.bincount(bucket, weights))
    border = int(sums.searchsorted(max(mass, math.ulp(0.0))))
    is_kept = bucket < border
    inside = np.flatnonzero(bucket == border)
    inside = inside[np.argsort(rank[inside], kind="stable")]
    is_kept[_start(inside, weights, mass - (float(sums[border - 1]) if border else 0.0))] = True
    return _find(is_kept)


def _start(order: Indices, weights: Probs, mass: float) -> Indices:
    """The shortest start of `order` whose weights reach `mass`; at least one."""
    sums = np.cumsum(weights[order], dtype=np.float64)
    return order[: int(sums.searchsorted(mass)) + 1]


def _find_nucleus(weights: Probs, total: float, mass: float) -> tuple[Indices, Probs]:
    """(ascending ids, weights) of all weights from some border on, which sum to at least `mass`.

    The border is cheap to find, and leaves few; `total` is the sum of all weights.
    """
    spare = max(total - mass - _SLACK * total, 0.0)
    # Fewer than n weights, each below an n-th of what may be left out, are less than that together.
    is_likely = weights >= np.float32(spare / len(weights))
    if np.count_nonzero(is_likely) <= len(weights) // _MANY:
        likely = np.flatnonzero(is_likely)
        return likely, weights[likely]
    step = len(weights) // _SAMPLE
    sample = np.sort(weights[::step])
    at = int(np.cumsum(sample, dtype=np.float64).searchsorted(_SAFE_SHARE * spare / step))
    likely = _find(weights >= sample[min(at, len(sample) - 1)])
    chosen = weights[likely]
    if chosen.sum(dtype=np.float64) < mass:
        likely = _find(is_likely)
        chosen = weights[likely]
    return likely, chosen


def _find(mask: npt.NDArray[np.bool_]) -> Indices:
    """The indices where `mask` is true, as np.flatnonzero.

    NumPy has a loop for masks with few hits, which takes 15 ns for each, and one of half a nanosecond for each entry,
    which it uses from one hit in ten. Appended hits choose the second loop if that one is faster.
    """
    n, count = len(mask), np.count_nonzero(mask)
    if n // _MANY < count <= n // 10:
        return np.flatnonzero(np.concatenate((mask, np.ones(n // 8, np.bool_))))[:count]
    return np.flatnonzero(mask)
