"""How a draft token is chosen from a draft's logits."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from edgespec.core.arrays import Logits, Probs, Rng
from edgespec.core.rng import index_at, sum_blocks
from edgespec.core.sampling import Sampler
from edgespec.core.truncation import highest

MAX_SIBLINGS = 3  # candidates besides the best token
_TAIL = 64  # tokens in which the texts of a round may differ
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

    def __init__(self, sampler: Sampler, rng: Rng) -> None:
        self.sampling = sampler.params
        self._sampler = sampler
        self._rng = rng

    def spawn_seed(self) -> int:
        """See TokenDraw."""
        return int(self._rng.integers(2**63))

    def draw(self, logits: Logits, prefix: Sequence[int]) -> tuple[int, Probs]:
        """See TokenDraw."""
        distribution = self._sampler.distribution(logits, prefix)
        return distribution.token(index_at(distribution.weights, self._rng.random())), distribution.dense(len(logits))


class TruncatedDraw:
    """A TokenDraw from the most probable tokens of a sampler chain alone, so that its distributions are short.

    They are float32 and hold the very weights that decide the draw. The number that decides depends on the seed, on
    `start`, the length of the text that is drafted for, and on the text before the token. So a draft is the same
    whenever it is made, and drafts for different texts are independent.
    """

    def __init__(self, sampler: Sampler, seed: int, most: int) -> None:
        """`most` is the number of tokens that a distribution has at most."""
        self.sampling = sampler.params
        self.start = 0
        self._sampler = sampler
        self._seed = seed
        self._most = most

    def spawn_seed(self) -> int:
        """See TokenDraw."""
        return self._seed

    def draw(self, logits: Logits, prefix: Sequence[int]) -> tuple[int, Probs]:
        """See TokenDraw."""
        found = self._sampler.distribution(logits, prefix)
        weights = found.weights
        ids = np.arange(len(weights), dtype=np.int32) if found.ids is None else found.ids
        kept = np.argpartition(weights, -self._most)[-self._most :] if len(weights) > self._most else slice(None)
        weights, ids = weights[kept], ids[kept]
        order = np.argsort(ids)  # not that of the weights, which rounding may change from one draft to another
        weights, ids = (weights[order] / weights.sum()).astype(np.float32), ids[order]
        tail = np.asarray(prefix[-_TAIL:], np.int32).tobytes()
        key = [self._seed, self.start, len(prefix), zlib.crc32(tail)]
        token = int(ids[index_at(weights, np.random.Generator(np.random.PCG64(key)).random())])
        q = np.zeros(len(logits), np.float32)
        q[ids] = weights
        return token, q
