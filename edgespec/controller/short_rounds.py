"""Rounds so short that weighing a draft tree would take a large part of one: chains of lookups, few records."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from edgespec.controller.batch_cost import MarginalCost
from edgespec.controller.drafter_set import DrafterSet
from edgespec.controller.own_time import Pace
from edgespec.controller.quick_lookups import Chain, QuickLookups
from edgespec.controller.review import Review
from edgespec.controller.stats import TextStats
from edgespec.core.protocols import Decision, Step

_PASSING_REASON = "steps are short: drafts are sought rarely"


class ShortRounds:
    """Of one text.

    is_active   whether a decision takes a part of a plain step that matters, as of the last recorded round
    is_passing  whether the present round goes by: plain, recorded with others later
    passing     the decision of such rounds
    """

    def __init__(self, cost: MarginalCost, stats: TextStats, review: Review, drafters: DrafterSet) -> None:
        self._cost = cost
        self._own_time = stats.own_time
        self._review = review
        self._lookups = QuickLookups(cost, stats, drafters)
        self._pace = Pace(stats.own_time)
        self._asking_s = 0.0  # that lookups took in a round that goes by
        self.is_active = False
        self.is_passing = False
        self.passing = Decision("none", _PASSING_REASON)

    @property
    def is_resting(self) -> bool:
        """Whether the next round goes by unless a lookup promises something."""
        return self._pace.is_resting

    @property
    def is_unsure(self) -> bool:
        """Whether a lookup could not say what it promises."""
        return self._lookups.is_unsure

    def begin_text(self) -> None:
        self._own_time.begin_text()
        self.update()
        if self.is_active:
            self.rest()

    def choose(self, tokens: Sequence[int]) -> Chain | None:
        """The chain to draft after `tokens`, if any; sets `is_passing`."""
        started_s = perf_counter()
        chain = None if self._pace.is_blind else self._lookups.choose(tokens)
        self.is_passing = chain is None and self._pace.is_resting
        if self.is_passing:
            self._pace.pass_round()
            self._asking_s = perf_counter() - started_s
        return chain

    def update(self) -> None:
        """A round begins that will be recorded."""
        plain_s = self._cost.seconds(1)
        self.is_active, self.is_passing = not self._own_time.is_negligible(plain_s), False
        self.passing = Decision("none", _PASSING_REASON, 1.0, plain_s)
        self._lookups.forget()

    def draft(self, chain: Chain, tokens: Sequence[int], limit: int) -> list[int]:
        """[n] of the chain's tokens; at most `limit`, and what the regret budget allows. The next rounds go by."""
        drafted = self._lookups.draft(chain, tokens, limit)
        allowed = self._review.find_max_nodes(len(drafted))
        if allowed < len(drafted):
            self._review.remember_blocked(tokens, drafted)
        self.rest()
        return drafted[:allowed]

    def rest(self) -> None:
        """The next rounds go by unless a lookup promises something."""
        self._pace.rest(self._cost.seconds(1))

    def rest_blind(self) -> None:
        """Nothing was drafted though something was promised: nobody is asked in the next rounds."""
        self._pace.rest_blind(self._cost.seconds(1))

    def gain(self) -> None:
        """A draft has gained tokens, or the regret budget lends for one that would have."""
        self._pace.gain()

    def record(self, step: Step) -> None:
        """Record a round that goes by."""
        self._review.pass_round(step, self._asking_s)
