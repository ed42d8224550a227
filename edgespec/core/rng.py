"""Random numbers of verification: drawn from a seed in production, enumerated by the proofs in tests/core."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgespec.core.arrays import Probs

_BLOCK = 512
_EXACT = 16_384  # weights that are summed in float64 throughout
_MASK = (1 << 64) - 1


class RandomSource(Protocol):
    """The two random decisions of an acceptance rule."""

    def accept(self, p: float, q: float) -> bool:
        """True with probability min(1, p / q); q > 0."""

    def choose(self, weights: Probs, position: int) -> int:
        """Index i with probability weights[i] / sum(weights), for the token at `position` of the sequence."""

    def uniform(self, position: int) -> float:
        """The number in [0, 1) that `choose` uses at `position`, for backends that sample on their device."""


class CounterRng:
    """A counter-based random number generator.

    `choose` depends on the seed and the position alone: a position draws the same number by plain decoding, through a
    draft, and on every backend. `accept` has its own stream.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed & _MASK

    @cached_property
    def _stream(self) -> np.random.Generator:
        """For the rules that reject; making it takes 0.1 ms."""
        return np.random.Generator(np.random.PCG64([self._seed, 1]))

    def accept(self, p: float, q: float) -> bool:
        return self._stream.random() * q < p

    def choose(self, weights: Probs, position: int) -> int:
        return index_at(weights, self.uniform(position))

    def uniform(self, position: int) -> float:
        return uniform(self._seed, position)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: SplitMix64's mixer (Steele et al. 2014) over seed and position."""
    z = _mix(_mix((seed + 0x9E3779B97F4A7C15) & _MASK) ^ ((position * 0x9E3779B97F4A7C15) & _MASK))
    return (z >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


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
    """The sums of 512 weights each, the last of those that are left.

    In float64, but within the blocks of more than 16,384 weights in their own type: 512 float32 weights are off by less
    than 1e-6 of their sum.
    """
    whole = len(weights) // _BLOCK * _BLOCK
    rows, rest = weights[:whole].reshape(-1, _BLOCK), weights[whole:]
    sums = np.einsum("ij->i", rows, dtype=np.float64 if len(weights) <= _EXACT else weights.dtype).astype(np.float64)
    return np.append(sums, rest.sum(dtype=np.float64)) if len(rest) else sums
