"""Chains of lookups for rounds so short that weighing a draft tree would take a large part of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from edgespec.controller.batch_cost import MarginalCost
from edgespec.controller.drafter_set import DrafterSet
from edgespec.controller.round import MAX_NODES
from edgespec.controller.stats import TextStats
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter
from edgespec.core.protocols import Budget


class Chain(NamedTuple):
    """A chain of `length` tokens of `drafter`, and what a round with it is expected to emit and to take."""

    drafter: Drafter
    length: int
    tokens: float
    seconds: float


class QuickLookups:
    """Asks drafters that take no time what they promise, and the one that promises most for a chain.

    Its length is that of most tokens per second if each token is accepted at the rate of the first one. It is computed
    once for each rate, until `forget`.
    """

    def __init__(self, cost: MarginalCost, stats: TextStats, drafters: DrafterSet) -> None:
        self._cost = cost
        self._stats = stats
        self._drafters = drafters
        self._seconds: list[float] = []  # of 0, 1, ... drafted tokens
        self._sizes: dict[float, tuple[int, float, float]] = {}  # rate -> length, tokens, seconds
        self.is_unsure = False  # whether one of them could not say what it promises

    def choose(self, tokens: Sequence[int]) -> Chain | None:
        """The chain that is worth most after `tokens`; None where plain decoding is."""
        best, chosen = 0.0, None
        self.is_unsure = False
        for drafter in self._drafters.free:
            confidence = self._drafters.foresee(drafter, tokens)
            if confidence is None:
                self.is_unsure = True
            elif confidence > 0:
                rate = self._stats.drafter(drafter).acceptance.rate(confidence)
                if rate > best:
                    best, chosen = rate, drafter
        if chosen is None:
            return None
        length, expected, seconds = self._choose_size(best)
        return Chain(chosen, length, expected, seconds) if length else None

    def draft(self, chain: Chain, tokens: Sequence[int], limit: int) -> list[int]:
        """[n] what the chain's drafter proposes after `tokens`; at most `limit` and `chain.length`."""
        n = min(chain.length, limit)
        tree = DraftTree()
        for _ in self._drafters.expand(chain.drafter, tree, tokens, Budget(n, n)):
            break
        return tree.path_tokens(tree.deepest(chain.drafter.name))

    def forget(self) -> None:
        """Costs and rates have changed."""
        self._seconds, self._sizes = [], {}

    def _choose_size(self, rate: float) -> tuple[int, float, float]:
        """(length, expected tokens, seconds); length 0 where no draft is faster than plain decoding."""
        if (found := self._sizes.get(rate)) is not None:
            return found
        if not self._seconds:
            own_s = self._stats.own_time.quick_s
            self._seconds = [self._cost.seconds(n + 1) + own_s * (n > 0) for n in range(MAX_NODES + 1)]
        found, expected, reached = (0, 1.0, self._seconds[0]), 1.0, 1.0
        for n, seconds in enumerate(self._seconds[1:], 1):
            reached *= rate
            expected += reached
            if expected * found[2] > found[1] * seconds:
                found = n, expected, seconds
        self._sizes[rate] = found
        return found
