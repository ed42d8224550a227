"""Random numbers of verification: drawn from a seed in production, enumerated by the proofs in tests/core."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np

from edgespec.core.arrays import Probs
from edgespec.core.weights import index_at

Rng = np.random.Generator
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


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
        """The stream of the rules that reject; making it takes 0.1 ms."""
        return np.random.Generator(np.random.PCG64([self._seed, 1]))

    def accept(self, p: float, q: float) -> bool:
        return self._stream.random() * q < p

    def choose(self, weights: Probs, position: int) -> int:
        return index_at(weights, self.uniform(position))

    def uniform(self, position: int) -> float:
        """A number in [0, 1) with 53 random bits: SplitMix64's mixer (Steele et al. 2014) over seed and position."""
        z = _mix(_mix((self._seed + _STEP) & _MASK) ^ ((position * _STEP) & _MASK))
        return (z >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
