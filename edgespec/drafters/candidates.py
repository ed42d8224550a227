"""How draft tokens are chosen from a draft's logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.core.arrays import Logits, Probs
from edgespec.core.rng import Rng
from edgespec.core.sampling import Distribution, Sampler
from edgespec.core.truncate import highest
from edgespec.core.weights import index_at, sum_blocks

MAX_SIBLINGS = 7  # candidates besides the best token
_MAX_GAP = 4.0  # nats below the best token; less probable tokens are not candidates


def best_tokens(logits: Logits) -> tuple[list[int], list[float]]:
    """(the most probable tokens, their probabilities), the best first. Raises BackendError for NaN logits."""
    best = float(highest(logits))
    near = np.flatnonzero(logits >= best - _MAX_GAP)
    order = near[np.argsort(-logits[near], kind="stable")][: 1 + MAX_SIBLINGS]
    weights = logits - best
    total = float(sum_blocks(np.exp(weights, out=weights)).sum())
    return order.tolist(), (np.exp(logits[order] - best, dtype=np.float64) / total).tolist()


class RequestDraw:
    """A TokenDraw by the sampler chain of a request."""

    def __init__(self, sampler: Sampler, rng: Rng, *, takes_trees: bool = False) -> None:
        self.takes_trees = takes_trees
        self._sampler = sampler
        self._rng = rng

    def draw(self, logits: Logits, prefix: Sequence[int]) -> tuple[int, Probs]:
        return self.draw_siblings(logits, prefix, 1)[0]

    def draw_siblings(self, logits: Logits, prefix: Sequence[int], n: int) -> list[tuple[int, Probs]]:
        rest, found = self._sampler.distribution(logits, prefix), list[tuple[int, Probs]]()
        while len(found) < n and rest.weights.any():
            index = index_at(rest.weights, self._rng.random())
            found.append((rest.token(index), rest.dense(len(logits))))
            weights = rest.weights.copy()
            weights[index] = 0
            rest = Distribution(rest.ids, weights)
        return found
