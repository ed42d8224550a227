"""One round of the autopilot: its draft as it grows, unit by unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest

from edgespec.autopilot.acceptance_record import LEAST_REACHED
from edgespec.autopilot.draft_size import MAX_NODES, DraftSize, choose_size, list_sizes
from edgespec.autopilot.drafter_set import DrafterSet
from edgespec.autopilot.marginal_cost import MarginalCost
from edgespec.autopilot.scored_tree import ScoredTree
from edgespec.autopilot.stats import TextStats
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import TREE_WIDTH, Drafter
from edgespec.core.protocols import Budget, Step

_OBSERVED_WEIGHT = 0.75  # of the emitted tokens against the expected ones, when a round is judged
_LOOK_AHEAD = 4  # further units that have to be worth less before a drafter stops
_LEAST_REACH = 0.1  # probability of a path by a drafter's own confidences, below which its block need not go on
_MAX_DRAFTED = 15  # tokens on a path of a drafter that takes time; a lookup proposes as many even if none is allowed


@dataclass(slots=True)
class DrafterCall:
    """A drafter that takes time, its task in a round, and its units of work.

    window    number of last tokens that it may read
    n_read    tokens of the text that it has to read first
    gain      tokens that asking it is expected to gain
    is_trial  whether it runs to be measured
    before    the size that was chosen without it
    size      the size that was chosen with it
    tree      the tree it adds to, with the lookups if the target takes trees
    units     the path length that each of its units proposed
    """

    drafter: Drafter
    window: int
    n_read: int
    gain: float
    before: DraftSize
    size: DraftSize
    tree: ScoredTree
    is_trial: bool = False
    units: list[int] = field(default_factory=list)

    @property
    def reason(self) -> str:
        return "to measure the drafter again" if self.is_trial else "the drafter is expected to win the most tokens/s"


class DraftRound:
    """A round from its draft to its Step. Seconds are those of the cost model."""

    def __init__(
        self,
        cost: MarginalCost,
        stats: TextStats,
        drafters: DrafterSet,
        tokens: Sequence[int],
        limit: Budget,
        tokens_per_step: float,
        *,
        is_chain: bool,
    ) -> None:
        """`tokens` are prompt and output; the last one is the root. `tokens_per_step` is that of recent rounds.

        `is_chain`: the target takes no branches.
        """
        self.tokens = tokens
        self.limit = Budget(limit.depth, min(limit.nodes, MAX_NODES))
        self.max_nodes = 0  # of the draft, by the regret budget
        self.recent_rate = tokens_per_step / cost.seconds(1)  # tokens per second
        self.price = 0.0  # tokens per second
        self.tree = ScoredTree(stats.rate, is_chain=is_chain)
        self.call: DrafterCall | None = None
        self._is_chain = is_chain
        self._cost = cost
        self._stats = stats
        self._drafters = drafters
        self._seconds: dict[int, float] = {}  # see `seconds`

    def seconds(self, rows: int) -> float:
        """Seconds of a forward by its rows, which are charged to this generation; always those of the first call."""
        if (found := self._seconds.get(rows)) is None:
            found = self._seconds[rows] = self._cost.seconds(rows)
        return found

    @property
    def drafting_s(self) -> float:
        """Seconds of the units that a drafter has been asked for, without reading."""
        call = self.call
        return sum([self._cost.model.unit_s(call.drafter.name, n) for n in call.units]) if call is not None else 0.0

    def choose_size(self, tree: ScoredTree) -> DraftSize:
        """The size of the highest value within the regret budget; sets the price."""
        sizes = list_sizes(tree.probabilities, self.seconds, self.drafting_s, self.max_nodes)
        size, self.price = choose_size(sizes, self.recent_rate)
        return size

    def choose_unlimited_size(self) -> DraftSize:
        """The size of the highest value without the regret budget and without drafters that take time."""
        sizes = list_sizes(self.tree.probabilities, self.seconds, 0.0, self.limit.nodes)
        return choose_size(sizes, self.recent_rate)[0]

    def find_fastest_size(self, tree: ScoredTree, ahead: Sequence[float] = (), more_s: float = 0.0) -> DraftSize:
        """The size of the most tokens per second, if `more_s` of drafting adds nodes of probabilities `ahead`."""
        seconds = self.drafting_s + more_s
        sizes = list_sizes([*tree.probabilities, *ahead], self.seconds, seconds, self.limit.nodes)
        return max(sizes, key=lambda each: each.speed)

    def measure_chain(self, tree: ScoredTree, ahead: Sequence[float] = (), more_s: float = 0.0) -> DraftSize:
        """The size of a whole drawn chain, after `more_s` of drafting that adds tokens of probabilities `ahead`."""
        n = len(tree) + len(ahead)
        seconds = self.drafting_s + more_s + self.seconds(n + 1)
        return DraftSize(n, 1.0 + sum(tree.probabilities) + sum(ahead), seconds)

    def gain(self, call: DrafterCall, step: Step) -> float:
        """The value in tokens that asking the drafter has added to the round.

        The tokens are a weighted mean of the emitted ones, which are partly luck, and the expected ones.
        """
        tokens = call.size.tokens + _OBSERVED_WEIGHT * (len(step.tokens) - call.size.tokens)
        seen = DraftSize(step.n_drafted, tokens, self.drafting_s + self.seconds(step.n_drafted + 1))
        return seen.value(self.price) - call.before.value(self.price)

    def ask_free(self, tree: ScoredTree) -> None:
        """Add what drafters that take no time propose, each up to where its next token would hardly be reached.

        While no first token is probable enough for a draft to pay, only first units are added.
        """
        depth = min(self.limit.depth, max(self.max_nodes, _MAX_DRAFTED))
        for drafter in self._drafters.free:
            for _ in self._drafters.expand(drafter, tree.tree, self.tokens, Budget(depth, depth)):
                reached = tree.probability(tree.tree.deepest(drafter.name))
                if reached < LEAST_REACHED or not self.may_pay(tree):
                    break

    def may_pay(self, tree: ScoredTree) -> bool:
        """Whether a first token is probable enough that a draft can be worth more than none."""
        least = self._cost.least_rate
        return any(tree.probability(node) >= least for node in tree.tree.children(-1))

    def ask(self, call: DrafterCall) -> None:
        """Have the drafter of `call` draft while that is expected to pay.

        Drafters that take no time continue its path afterwards, unless its tokens are drawn.
        """
        drafter, tree = call.drafter, call.tree
        max_nodes = self.max_nodes if drafter.is_drawn else self.limit.nodes
        max_depth = min(self.limit.depth, max_nodes, _MAX_DRAFTED)
        if drafter.block_size > 1:
            max_depth = self._choose_length(drafter, min(max_depth, drafter.block_size))
            limit = Budget(max_depth, min(self.limit.nodes, _MAX_DRAFTED), call.window, _LEAST_REACH)
        else:
            limit = Budget(max_depth, self.limit.nodes, call.window, self._find_reach(drafter))
        for _ in self._drafters.expand(drafter, tree.tree, self.tokens, limit):
            call.units.append(min(drafter.block_size, max_depth))
            if not self._pays_to_continue(drafter, tree, limit):
                break
        if call.units and not drafter.is_drawn:
            self.ask_free(tree)

    def _find_reach(self, drafter: Drafter) -> float:
        """The least probability of a path that is worth a row of the draft's forward and one of the target's.

        Rows are assumed to slow down the draft's forward by the same factor as the target's. 1 if only one path can be
        continued.
        """
        if self._is_chain or not drafter.grows_trees:
            return 1.0
        rows, whole = 1 + TREE_WIDTH, self._cost.model.seconds  # `whole`: not shared with other generations
        drafted_s = self._cost.model.unit_s(drafter.name) * (whole(rows) / whole(1) - 1.0)
        return self.price * (self.seconds(rows) - self.seconds(1) + drafted_s) / TREE_WIDTH

    def predict_chain(self, drafter: Drafter) -> list[float]:
        """[n] the probabilities of the tokens of a chain that is worth most, before any of them is known."""
        n = self._choose_length(drafter, min(self.limit.depth, self.max_nodes, _MAX_DRAFTED))
        rate = self._stats.drafter(drafter).first_choice.value
        return [rate ** (i + 1) for i in range(n)]

    def _choose_length(self, drafter: Drafter, limit: int) -> int:
        """The tokens on a path, up to `limit`, that are worth most before any of them is known."""
        rate, costs = self._stats.drafter(drafter).first_choice.value, self._cost.model
        best, chosen, expected, reached = float("-inf"), min(1, limit), 1.0, 1.0
        for n in range(1, limit + 1):
            reached *= rate
            expected += reached
            drafting_s = costs.unit_s(drafter.name, n) if drafter.block_size > 1 else n * costs.unit_s(drafter.name)
            worth = expected - self.price * (drafting_s + self.seconds(n + 1))
            if worth > best:
                best, chosen = worth, n
        return chosen

    def _pays_to_continue(self, drafter: Drafter, tree: ScoredTree, limit: Budget) -> bool:
        """Whether one to `_LOOK_AHEAD` more units are worth their seconds, if accepted like best proposals are."""
        continued = [tree.probability(node) for node in _list_ends(tree.tree, drafter, limit)]
        if not continued:
            return False
        measure = self.measure_chain if drafter.is_drawn else self.find_fastest_size
        unit_s = self._cost.model.unit_s(drafter.name)
        rate = self._stats.drafter(drafter).first_choice.value
        now = measure(tree)
        price = max(self.price, now.speed)
        continued = nlargest(TREE_WIDTH, continued)
        ahead: list[float] = []
        for n in range(1, _LOOK_AHEAD + 1):
            continued = [probability * rate for probability in continued]
            ahead += continued
            if measure(tree, ahead, n * unit_s).value(price) > now.value(price):
                return True
        return False


def _list_ends(tree: DraftTree, drafter: Drafter, limit: Budget) -> list[int]:
    """The nodes that the next unit of `drafter` may continue: the deepest one, or all ends of a tree."""
    if not (drafter.grows_trees and limit.has_branches):
        last = tree.deepest(drafter.name)
        return [last] if last >= 0 and tree.depths[last] < limit.depth else []
    inner = {parent for parent, votes in zip(tree.parents, tree.votes, strict=True) if drafter.name in votes}
    ends = [node for node, votes in enumerate(tree.votes) if drafter.name in votes and node not in inner]
    return [node for node in ends if tree.depths[node] < limit.depth]
