"""Whether lookups are worth asking in a round: a quick answer, without making their proposals."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.controller.batch_cost import MarginalCost
from edgespec.controller.drafter_set import DrafterSet
from edgespec.controller.own_time import OwnTime
from edgespec.controller.round import MAX_NODES
from edgespec.controller.stats import TextStats

_REFRESH_ROUNDS = 16  # between two computations of the bar; costs change slowly


class LookupBar:
    """The acceptance of a next token below which no draft of lookups can pay, at the usual costs.

    A draft of n tokens emits at most the sum of r * b^i more (i < n) than plain decoding, where r is the acceptance of
    the first and b that of the tokens of which the drafter is surest.
    """

    def __init__(self, cost: MarginalCost, stats: TextStats, own_time: OwnTime, drafters: DrafterSet) -> None:
        self._cost = cost
        self._stats = stats
        self._own_time = own_time
        self._drafters = drafters
        self._rate = 0.0
        self._rounds = 0  # that the rate is valid for
        self._n_peers = 0

    def is_reached(self, tokens: Sequence[int]) -> bool:
        """Whether drafters that take no time promise enough after `tokens`."""
        promised = 0.0
        for drafter in self._drafters:
            if drafter.is_free:
                confidence = self._drafters.foresee(drafter, tokens)
                if confidence is None:
                    return True
                if confidence > 0:
                    promised += self._stats.drafter(drafter).acceptance.rate(confidence)
        return promised > 0 and promised >= self._find_rate()

    def glance(self, tokens: Sequence[int]) -> bool:
        """Whether one of them promises enough by the last bar, or cannot say."""
        for drafter in self._drafters:
            if drafter.is_free:
                confidence = self._drafters.foresee(drafter, tokens)
                if confidence is None:
                    return True
                if confidence > 0 and self._stats.drafter(drafter).acceptance.rate(confidence) >= self._rate:
                    return True
        return False

    def _find_rate(self) -> float:
        if not self._rounds or self._cost.n_peers != self._n_peers:
            self._rounds, self._n_peers = _REFRESH_ROUNDS, self._cost.n_peers
            self._rate = self._compute_rate()
        self._rounds -= 1
        return self._rate

    def _compute_rate(self) -> float:
        free = [each for each in self._drafters if each.is_free]
        best = max((max(self._stats.drafter(each).acceptance.values) for each in free), default=1.0)
        plain_s, own_s = self._cost.seconds(1), self._own_time.deciding_s
        found, sum_of_powers = 1.0, 0.0
        for n in range(1, MAX_NODES + 1):
            sum_of_powers += best ** (n - 1)
            found = min(found, ((self._cost.seconds(n + 1) + own_s) / plain_s - 1.0) / sum_of_powers)
        return found
