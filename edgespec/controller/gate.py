"""The decision which drafter that takes time a round asks next, and how much of the text it may read first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from edgespec.controller.acceptance import LEAST_REACHED, DecayedMean
from edgespec.controller.cost_model import MarginalCost
from edgespec.controller.drafter_set import DrafterSet
from edgespec.controller.round import DrafterCall, RoundPlan, ScoredTree
from edgespec.controller.stats import TextStats
from edgespec.core.drafter import Drafter
from edgespec.core.protocols import Budget

# The regret budget: a limit on the time that drafting may lose against plain decoding.


_ALLOWED_SHARE = 0.01  # of all time
_LEAST_ALLOWED, _MOST_ALLOWED = 1.0, 2.0  # plain steps, in addition
_USUAL_ROWS = range(4, 17)  # of a forward with a lookup's draft
_MAX_SAVINGS = 32.0  # plain steps of earlier gains that a round may risk, in addition: a long draft on a CPU
_LENT_SHARE = 1 / 8  # of the gains that blocked drafts would have had, lent in any case
_READ_ROUNDS = 64  # rounds over which the reading of the draft model is charged


def choose_allowed_loss(seconds: Callable[[int], float]) -> float:
    """Plain steps that one text may lose: as many as the cheapest draft of usual size, from one to two.

    `seconds` maps rows of a forward to its time. Less would forbid all drafts where more rows are expensive.
    """
    cheapest_s = min(seconds(rows) for rows in _USUAL_ROWS)
    return min(max(_LEAST_ALLOWED, cheapest_s / seconds(1) - 1.0), _MOST_ALLOWED)


class RegretBudget:
    """The account of one generation, in plain steps: one plain step is the time of a forward without a draft.

    Whatever is drafted, the loss stays below twice the allowed loss plus `_ALLOWED_SHARE` of the time and `_LENT_SHARE`
    of what blocked drafts would have gained.
    """

    def __init__(self, allowed: float) -> None:
        """`allowed`: see `choose_allowed_loss`."""
        self._allowed = allowed
        self._balance = 0.0
        self._credit = 0.0  # the part of the balance that shadow drafts have lent
        self._shadow_balance = 0.0  # what shadow drafts would have lost and not yet won back; at most 0
        self._read_debt = 0.0  # reading of drafters that is not yet charged
        self._elapsed = 0.0

    def add_reading(self, steps: float) -> None:
        """Drafters have read text for `steps` plain steps, which the next rounds are charged for."""
        self._read_debt += steps

    def add(self, tokens: int, steps: float) -> None:
        """A round emitted `tokens` in a usual time of `steps` plain steps. Its gain repays the credit first."""
        charged = self._read_debt / _READ_ROUNDS
        self._read_debt -= charged
        steps += charged
        self._elapsed += steps
        gain = tokens - steps
        repaid = min(max(gain, 0.0), self._credit)
        self._credit -= repaid
        self._balance = min(self._balance + gain - repaid, _MAX_SAVINGS)

    def add_shadow(self, tokens: int, steps: float) -> None:
        """A draft that the budget did not allow would have emitted `tokens` in `steps` plain steps.

        Once the gains of such drafts outweigh their losses, the surplus is lent to the next rounds, up to the allowed
        loss, and a part of it beyond that. Their losses cost no time and reduce nothing.
        """
        balance = self._shadow_balance + tokens - steps
        self._shadow_balance = min(max(balance, -self._allowed), 0.0)
        lent = max(_LENT_SHARE * balance, min(balance, self._allowed - self._credit))
        lent = min(lent, self._allowed - self._balance)
        if lent > 0:
            self._balance += lent
            self._credit += lent

    def allowance(self, n_peers: int = 0) -> float:
        """Plain steps that the next round may lose if its whole draft is rejected.

        Generations that share their forwards also share the initial allowance: with `n_peers` others each has its part.
        """
        return self._balance + _ALLOWED_SHARE * self._elapsed + self._allowed / (1 + n_peers)


_MIN_WINDOW = 16  # tokens of context; with fewer a draft model is not asked
_AMORTIZED_ROUNDS = 64  # rounds over which a drafter has to earn the time of its reading
_TOKENS_PER_ROUND = 2.0  # emitted where drafting pays; estimates the rounds that are left of a text
_MIN_EVIDENCE = 4.0  # measured gains; a drafter with fewer that is expected to pay is asked before the others
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
        self._tried: dict[tuple[str, tuple[str, ...]], int] = {}  # (drafter, asked before it) -> position

    def begin(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length

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
        return self._cost.model.has_cost(drafter.name) and not (after and (drafter.is_drawn or drafter.is_async))

    def _make_request(self, drafter: Drafter, tokens: Sequence[int]) -> DraftRequest | None:
        """A request to the drafter; None where it may not read enough, and where it has failed."""
        window = self._max_window(drafter, tokens)
        unread = self._drafters.pending_tokens(drafter, tokens)
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
        if trial is not None and not budget.spend((unit_s + reading_s) / plain_s + lost):
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


# Shadow drafts: drafts that the regret budget does not allow, compared with the text that is emitted instead.


class ShadowDraft:
    """One path at a time."""

    def __init__(self) -> None:
        self._start = 0
        self._draft: list[int] = []
        self._nodes = 0

    @property
    def is_pending(self) -> bool:
        return bool(self._draft)

    def remember(self, start: int, path: list[int], nodes: int) -> None:
        """The most probable `path` of a draft of `nodes` nodes continues the text at position `start`."""
        self._start, self._draft, self._nodes = start, path, nodes

    def resolve(self, text: Sequence[int]) -> tuple[int, int] | None:
        """(tokens that the round would have emitted, rows of its forward); None while `text` is too short to tell."""
        draft, n_right = self._draft, 0
        if not draft:
            return None
        for drafted, emitted in zip(draft, text[self._start :], strict=False):
            if drafted != emitted:
                break
            n_right += 1
        if n_right < len(draft) and self._start + n_right >= len(text):
            return None
        self._draft = []
        return n_right + 1, self._nodes + 1


# Fills a round's draft tree: from drafters that take no time, then unit by unit from one that does.


_LOOK_AHEAD = 4  # further units that have to be worth less before a drafter stops
_LEAST_REACH = 0.1  # probability of a path by a drafter's own confidences, below which its block need not go on
_MAX_DRAFTED = 15  # tokens on a path of a drafter that takes time, and of a lookup that may not be verified


class TreeBuilder:
    """Drives the drafters of one generation."""

    def __init__(self, drafters: DrafterSet, stats: TextStats, cost: MarginalCost) -> None:
        self._drafters = drafters
        self._stats = stats
        self._cost = cost

    def ask_free(self, tree: ScoredTree, tokens: Sequence[int], round_: RoundPlan) -> None:
        """The proposals of the drafters that take no time, each up to where its next token would hardly be reached."""
        depth = min(round_.depth_limit, max(round_.max_nodes, _MAX_DRAFTED))
        for drafter in self._drafters.free:
            for _ in self._drafters.expand(drafter, tree.tree, tokens, Budget(depth, depth)):
                if tree.probability(tree.tree.deepest(drafter.name)) < LEAST_REACHED:
                    break

    def ask(
        self, request: DraftRequest, asked: DrafterCall, tree: ScoredTree, tokens: Sequence[int], round_: RoundPlan
    ) -> None:
        """Have the drafter of `request` draft while that is expected to pay; `asked` counts its units.

        Drafters that take no time continue its path afterwards, unless its tokens are drawn.
        """
        drafter, started = request.drafter, perf_counter()
        max_nodes = round_.max_nodes if drafter.is_drawn else round_.node_limit
        max_depth = min(round_.depth_limit, max_nodes, _MAX_DRAFTED)
        if drafter.block_size > 1:
            max_depth = self._choose_length(drafter, min(max_depth, drafter.block_size), round_)
        limit = Budget(max_depth, min(round_.node_limit, _MAX_DRAFTED), request.window, _LEAST_REACH)
        for _ in self._drafters.expand(drafter, tree.tree, tokens, limit):
            asked.units.append(min(drafter.block_size, max_depth))
            if not self._pays_to_continue(drafter, round_, tree, max_depth):
                break
        asked.seen_s = perf_counter() - started
        if asked.units and not drafter.is_drawn:
            self.ask_free(tree, tokens, round_)

    def predict_chain(self, drafter: Drafter, round_: RoundPlan) -> list[float]:
        """[n] the probabilities of the tokens of a chain that is worth most, before any of them is known."""
        n = self._choose_length(drafter, min(round_.depth_limit, round_.max_nodes, _MAX_DRAFTED), round_)
        rate = self._stats.drafter(drafter).first_choice.value
        return [rate ** (i + 1) for i in range(n)]

    def _choose_length(self, drafter: Drafter, limit: int, round_: RoundPlan) -> int:
        """The tokens on a path, up to `limit`, that are worth most before any of them is known."""
        rate = self._stats.drafter(drafter).first_choice.value
        name, costs, cost = drafter.name, self._cost.model, self._cost
        best, chosen, expected, reached = float("-inf"), min(1, limit), 1.0, 1.0
        for n in range(1, limit + 1):
            reached *= rate
            expected += reached
            drafting_s = costs.unit_s(name, n) if drafter.block_size > 1 else n * costs.unit_s(name)
            worth = expected - round_.price * (drafting_s + cost.seconds(n + 1))
            if worth > best:
                best, chosen = worth, n
        return chosen

    def _pays_to_continue(self, drafter: Drafter, round_: RoundPlan, tree: ScoredTree, max_depth: int) -> bool:
        """Whether one to `_LOOK_AHEAD` more units are worth their seconds, if accepted like best proposals are."""
        last = tree.tree.deepest(drafter.name)
        if last < 0 or tree.tree.depths[last] >= max_depth:
            return False
        measure = round_.measure_chain if drafter.is_drawn else round_.find_fastest_size
        unit_s = self._cost.model.unit_s(drafter.name)
        rate, probability = self._stats.drafter(drafter).first_choice.value, tree.probability(last)
        now = measure(tree)
        price = max(round_.price, now.speed)
        ahead: list[float] = []
        for n in range(1, _LOOK_AHEAD + 1):
            probability *= rate
            ahead.append(probability)
            if measure(tree, ahead, n * unit_s).value(price) > now.value(price):
                return True
        return False
