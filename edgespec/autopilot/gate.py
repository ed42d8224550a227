"""Decides whether a round asks a drafter that takes time, and which one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from edgespec.autopilot.decayed_mean import DecayedMean
from edgespec.autopilot.draft_size import DraftSize
from edgespec.autopilot.drafter_set import DrafterSet
from edgespec.autopilot.marginal_cost import MarginalCost
from edgespec.autopilot.regret import RegretBudget
from edgespec.autopilot.round import DrafterCall, DraftRound
from edgespec.autopilot.stats import TextStats
from edgespec.core.drafter import Drafter

_MIN_WINDOW = 16  # tokens of context; with fewer a draft model is not asked
_AMORTIZED_ROUNDS = 64  # rounds over which a drafter has to earn the time of its reading
_TOKENS_PER_ROUND = 2.0  # emitted if drafting pays; estimates the rounds that are left of a text
_MIN_EVIDENCE = 4.0  # measured gains; a drafter with fewer that is expected to pay is asked before the others
_READ_SHARE = 0.03  # plain steps for each emitted token that reading may take, in addition to the regret budget


class DraftGate:
    """Decides which of the drafters that take time may draft in a generation.

    They compete: the one with the highest gain is asked. A drafter that does not pay is asked from time to time in
    place of those that do, to measure it again; all of them together have one budget for that.

    prompt_length  tokens of the generation's prompt
    """

    def __init__(self, cost: MarginalCost, regret: RegretBudget, drafters: DrafterSet, stats: TextStats) -> None:
        self._cost = cost
        self._regret = regret
        self._drafters = drafters
        self._stats = stats
        self.prompt_length = 0
        self._tried: dict[str, int] = {}  # drafter -> position

    def choose(self, round_: DraftRound, lookups: DraftSize, silent: Collection[str]) -> DrafterCall | None:
        """The drafter to ask; None if none is expected to pay.

        `lookups` is the draft size that was chosen without a drafter that takes time. `silent` names the drafters that
        had nothing to propose in this round.
        """
        if not round_.max_nodes:
            return None
        has_cost = self._cost.model.has_cost
        drafters = [each for each in self._drafters.timed if each.name not in silent and has_cost(each.name)]
        calls = [self._prepare(each, round_, lookups) for each in drafters if self._gain(each).value > 0]
        paying = {each.drafter.name: each for each in calls if each is not None and each.gain > 0}
        if paying and len(drafters) == 1:
            self._stats.exploration.reset()
        idle = [each for each in drafters if each.name not in paying]
        if idle and (paying or not lookups.nodes):  # if none pays, only rounds without a lookup measure one
            lost = max((each.gain for each in paying.values()), default=0.0)  # by not asking the best one
            if (trial := self._choose_trial(idle, round_, lookups, lost)) is not None:
                return trial
        if not paying:
            return None
        unknown = [each for each in paying.values() if self._gain(each.drafter).evidence[1] < _MIN_EVIDENCE]
        best = max(unknown or paying.values(), key=lambda each: each.gain)
        self._tried[best.drafter.name] = self._cost.position
        return best

    def _prepare(self, drafter: Drafter, round_: DraftRound, lookups: DraftSize) -> DrafterCall | None:
        """A call of the drafter; None if it may not read enough, or if it has failed.

        The gain of the call is the drafter's usual one, less the price of its reading spread over the rounds to come.
        """
        tokens = round_.tokens
        window, read_s = self._max_window(drafter, tokens), self._cost.model.read_s(drafter.name)
        unread = self._drafters.pending_tokens(drafter, tokens)
        if drafter.name in self._drafters.failures or (min(window, len(tokens)) < _MIN_WINDOW and unread > window):
            return None
        n_read = max(0, min(window, unread) - 1)
        rounds = min(_AMORTIZED_ROUNDS, round_.limit.depth / _TOKENS_PER_ROUND)
        gain = self._gain(drafter).value - round_.price * n_read * read_s / rounds
        return DrafterCall(drafter, window, n_read, gain, lookups, lookups, round_.tree)

    def _gain(self, drafter: Drafter) -> DecayedMean:
        return self._stats.drafter(drafter).gain(self._cost.peers.sessions)

    def _choose_trial(
        self, idle: Sequence[Drafter], round_: DraftRound, lookups: DraftSize, lost: float
    ) -> DrafterCall | None:
        """A call of the drafter of `idle` that was tried the longest ago; None if the exploration budget forbids it.

        `lost` is the gain in tokens of the best paying drafter, which the trial displaces.
        """
        drafter = min(idle, key=lambda each: self._tried.get(each.name, -1))
        costs, budget, plain_s = self._cost.model, self._stats.exploration, self._cost.seconds(1)
        trial = self._prepare(drafter, round_, lookups)
        if trial is not None:
            seconds = costs.unit_s(drafter.name) + trial.n_read * costs.read_s(drafter.name)
            if not budget.spend(seconds / plain_s + lost):
                return None
            trial.is_trial = True
        self._tried[drafter.name] = self._cost.position  # even if it may not read enough: the others' turn
        return trial

    def _max_window(self, drafter: Drafter, tokens: Sequence[int]) -> int:
        """Tokens that `drafter` may read: as many as the regret budget and a share of the output pay for."""
        read_s = self._cost.model.read_s(drafter.name)
        if not read_s:
            return len(tokens)
        steps = self._regret.allowance(self._cost.peers.sessions) + _READ_SHARE * (len(tokens) - self.prompt_length)
        return int(steps * self._cost.seconds(1) / read_s)
