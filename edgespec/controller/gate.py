"""The decision which drafter that takes time a round asks next, and how much of the text it may read first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgespec.controller.batch_cost import MarginalCost
from edgespec.controller.drafter_set import DrafterSet
from edgespec.controller.estimator import DecayedMean
from edgespec.controller.regret import RegretBudget
from edgespec.controller.round import RoundPlan
from edgespec.controller.stats import TextStats
from edgespec.core.drafter import Drafter

_MIN_WINDOW = 16  # tokens of context; with fewer a draft model is not asked
_AMORTIZED_ROUNDS = 64  # rounds over which a drafter has to earn the time of its reading
_TOKENS_PER_ROUND = 2.0  # emitted where drafting pays; estimates the rounds that are left of a text
_MIN_EVIDENCE = 4.0  # measured gains; a drafter with fewer that is expected to pay is asked before the others
_IDLE_TOKENS = 32  # between two checks whether a drafter may be chosen, where none was
_READ_SHARE = 0.03  # plain steps for each emitted token that reading may take, in addition to the regret budget


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Ask `drafter`: how many tokens of the text's end it may read, and how many of them are unread.

    `is_trial`: to measure it, so that no other one is asked after it.
    """

    drafter: Drafter
    window: int
    n_read: int
    is_trial: bool = False

    @property
    def reason(self) -> str:
        return "to measure the drafter again" if self.is_trial else "the drafter is expected to win the most tokens/s"


class DraftGate:
    """For the drafters of one generation that take time.

    They compete: the one with the highest gain is asked first, another one after it only if it pays beside what is
    already in the tree. A drafter that does not pay is asked from time to time in place of those that do, to measure it
    again; all of them together have one budget for that.
    """

    def __init__(self, cost: MarginalCost, regret: RegretBudget, drafters: DrafterSet, stats: TextStats) -> None:
        self._cost = cost
        self._regret = regret
        self._drafters = drafters
        self._stats = stats
        self._prompt_length = 0
        self._idle_until = 0  # position
        self._trial_steps = 0.0  # plain steps of the last trial that was considered
        self._tried: dict[tuple[str, tuple[str, ...]], int] = {}  # (drafter, asked before it) -> position

    def begin(self, prompt_length: int) -> None:
        self._prompt_length, self._idle_until = prompt_length, 0

    @property
    def has_gained(self) -> bool:
        """Whether a drafter that takes time has gained when it was asked first."""
        timed, has_cost = self._drafters.timed, self._cost.model.has_cost
        return any(self._gain(each, ()).value > 0 for each in timed if has_cost(each.name))

    def may_choose(self, position: int) -> bool:
        """Whether a drafter may be chosen in a round that has asked none; a quick check before `choose`.

        After a no it is not checked again for some tokens.
        """
        if self.has_gained:
            return True
        if position < self._idle_until:
            return False
        cost, cheapest_s = self._cost, math.inf
        for each in self._drafters.timed:
            if cost.model.has_cost(each.name):
                cheapest_s = min(cheapest_s, cost.model.unit_s(each.name))
        if self._stats.exploration.allows(max(cheapest_s / cost.seconds(1), self._trial_steps)):
            return True
        self._idle_until = position + _IDLE_TOKENS
        return False

    def choose(
        self, round_: RoundPlan, tokens: Sequence[int], remaining: int, *, has_lookup: bool
    ) -> DraftRequest | None:
        """The drafter to ask next, after those that the round has asked; None if no further one is expected to pay.

        `remaining` is the number of tokens that the text may still get. `has_lookup`: whether drafters that take no
        time have proposed something worth verifying.
        """
        if not round_.max_nodes or any(each.drafter.is_drawn for each in round_.asked):
            return None
        after = tuple(each.drafter.name for each in round_.asked)
        drafters = [each for each in self._drafters if self._may_ask(each, round_, after)]
        hopeful = [each for each in drafters if self._gain(each, after).value > 0]
        requests = [request for each in hopeful if (request := self._make_request(each, tokens)) is not None]
        gains = {each.drafter.name: self._net_gain(each, round_, after, remaining) for each in requests}
        paying = [each for each in requests if gains[each.drafter.name] > 0]
        if not after and paying and len(drafters) == 1:
            self._stats.exploration.reset()
        names = {each.drafter.name for each in paying}
        idle = [each for each in drafters if each.name not in names and each.name not in self._drafters.failures]
        if idle and (after or paying or not has_lookup):  # where none pays, only rounds without a lookup measure one
            lost = max((gains[name] for name in names), default=0.0)  # by not asking the best one
            if (trial := self._choose_trial(idle, tokens, after, lost)) is not None:
                return trial
        if not paying:
            return None
        unknown = [each for each in paying if self._gain(each.drafter, after).evidence[1] < _MIN_EVIDENCE]
        best = max(unknown or paying, key=lambda each: gains[each.drafter.name])
        self._tried[best.drafter.name, after] = round_.position
        return best

    def _may_ask(self, drafter: Drafter, round_: RoundPlan, after: tuple[str, ...]) -> bool:
        """Whether the drafter takes time that is known, has not been asked in the round, and may join its tree."""
        if drafter.is_free or drafter.name in after or drafter.name in round_.silent:
            return False
        return self._cost.model.has_cost(drafter.name) and not (after and (drafter.is_drawn or drafter.is_lazy))

    def _make_request(self, drafter: Drafter, tokens: Sequence[int]) -> DraftRequest | None:
        """None where the drafter may not read enough, and where it has failed."""
        window = self._max_window(drafter, tokens)
        unread = self._drafters.unread(drafter, tokens)
        if drafter.name in self._drafters.failures or (min(window, len(tokens)) < _MIN_WINDOW and unread > window):
            return None
        return DraftRequest(drafter, window, max(0, min(window, unread) - 1))

    def _net_gain(self, request: DraftRequest, round_: RoundPlan, after: tuple[str, ...], remaining: int) -> float:
        """The expected gain of asking, less the price of the reading spread over the rounds to come; in tokens."""
        read_s = request.n_read * self._cost.model.read_s(request.drafter.name)
        rounds = min(_AMORTIZED_ROUNDS, remaining / _TOKENS_PER_ROUND)
        return self._gain(request.drafter, after).value - round_.price * read_s / rounds

    def _gain(self, drafter: Drafter, after: tuple[str, ...]) -> DecayedMean:
        return self._stats.gain(drafter, self._cost.n_peers, after)

    def _choose_trial(
        self, idle: Sequence[Drafter], tokens: Sequence[int], after: tuple[str, ...], lost: float
    ) -> DraftRequest | None:
        """The one of `idle` that was not measured for the longest time, if the budget allows.

        `lost` is the gain in tokens of the drafter that is not asked because of it.
        """
        drafter = min(idle, key=lambda each: self._tried.get((each.name, after), -1))
        costs, budget, plain_s = self._cost.model, self._stats.exploration, self._cost.seconds(1)
        unit_s = costs.unit_s(drafter.name)
        if not budget.allows(unit_s / plain_s + lost):
            return None
        trial = self._make_request(drafter, tokens)
        reading_s = trial.n_read * costs.read_s(drafter.name) if trial is not None else 0.0
        self._trial_steps = (unit_s + reading_s) / plain_s
        if trial is not None and not budget.spend(self._trial_steps + lost):
            return None
        self._tried[drafter.name, after] = len(tokens) - 1  # also where it may not read enough: the others' turn
        return replace(trial, is_trial=True) if trial is not None else None

    def _max_window(self, drafter: Drafter, tokens: Sequence[int]) -> int:
        """Tokens that `drafter` may read: as many as the regret budget and a share of the output pay for."""
        read_s = self._cost.model.read_s(drafter.name)
        if not read_s:
            return len(tokens)
        steps = self._regret.allowance(self._cost.n_peers) + _READ_SHARE * (len(tokens) - self._prompt_length)
        return int(steps * self._cost.seconds(1) / read_s)
