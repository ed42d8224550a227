"""Chains of lookups for rounds so short that weighing a draft tree would take a large part of one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from edgespec.controller.batch_cost import MarginalCost
from edgespec.controller.drafter_set import DrafterSet
from edgespec.controller.stats import TextStats
from edgespec.controller.value import MAX_NODES, DraftSize, list_counts
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter
from edgespec.core.protocols import Budget

_CHEAP = (1, 3)  # drafted tokens of the cheapest rounds: four rows may take less time than two


class Chain(NamedTuple):
    """A chain of `drafter`, and what a round with it is expected to emit and to take."""

    drafter: Drafter
    size: DraftSize


class QuickLookups:
    """Asks drafters that take no time what they promise, and the one that promises most for a chain.

    Its length is that of most tokens per second by the learned rates. It is computed once for each promise, until
    `forget`.
    """

    def __init__(self, cost: MarginalCost, stats: TextStats, drafters: DrafterSet) -> None:
        self._cost = cost
        self._stats = stats
        self._drafters = drafters
        self._seconds: dict[int, float] = {}  # by drafted tokens
        self._sizes: dict[tuple[str, float], DraftSize] = {}  # by drafter and promise
        self.is_unsure = False  # whether one of them could not say what it promises

    def choose(self, tokens: Sequence[int]) -> Chain | None:
        """The chain that is worth most after `tokens`; None where plain decoding is."""
        best: Chain | None = None
        self.is_unsure = False
        for drafter in self._drafters.free:
            confidence = self._drafters.foresee(drafter, tokens)
            if confidence is None:
                self.is_unsure = True
            elif confidence > 0:
                size = self._choose_size(drafter, confidence)
                if size.nodes and (best is None or size.speed > best.size.speed):
                    best = Chain(drafter, size)
        return best

    def draft(self, chain: Chain, tokens: Sequence[int], limit: int) -> list[int]:
        """[n] what the chain's drafter proposes after `tokens`; at most `limit` and as many as the chain has."""
        n = min(chain.size.nodes, limit)
        tree = DraftTree()
        for _ in self._drafters.expand(chain.drafter, tree, tokens, Budget(n, n)):
            break
        return tree.path_tokens(tree.deepest(chain.drafter.name))

    def forget(self) -> None:
        """Costs and rates have changed."""
        self._seconds, self._sizes = {}, {}

    def _choose_size(self, drafter: Drafter, confidence: float) -> DraftSize:
        """The fastest size of a chain whose first token has `confidence`."""
        acceptance = self._stats.drafter(drafter).acceptance
        key = drafter.name, acceptance.simplify(confidence)
        if (found := self._sizes.get(key)) is None:
            expected = list(accumulate(acceptance.survival(key[1], MAX_NODES), initial=1.0))
            found = DraftSize(0, 1.0, self._measure(0))
            if expected[-1] / min(map(self._measure, _CHEAP)) > found.speed:  # else no size can be faster
                sizes = [DraftSize(n, expected[n], self._measure(n)) for n in list_counts(len(expected) - 1)]
                found = max(sizes, key=attrgetter("speed"))
            self._sizes[key] = found
        return found

    def _measure(self, n: int) -> float:
        """Seconds of a round with a chain of `n` tokens."""
        if (found := self._seconds.get(n)) is None:
            own_s = self._stats.own_time.quick_s(n) if n else 0.0
            found = self._seconds[n] = self._cost.seconds(n + 1) + own_s
        return found
