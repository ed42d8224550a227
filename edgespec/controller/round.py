"""One round of the autopilot: its draft as it grows, unit by unit, and what sizes of it are worth."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import nlargest
from itertools import accumulate
from typing import NamedTuple

from edgespec.controller.acceptance import LEAST_REACHED
from edgespec.controller.cost_model import MarginalCost
from edgespec.controller.drafter_set import DrafterSet
from edgespec.controller.stats import TextStats
from edgespec.core.drafter import TREE_WIDTH, Drafter
from edgespec.core.protocols import Budget, Draft, Step
from edgespec.core.tree import DraftTree

# A draft tree with the probability that the target emits each node.


_MAX_RATE = 0.999  # of all that one drafter proposes instead of a token


class ScoredTree:
    """A DraftTree and the probabilities of its nodes' whole paths."""

    def __init__(self, rate: Callable[[dict[str, float]], float], *, is_chain: bool = False) -> None:
        """`rate` maps the votes of a node to its acceptance once its parent is accepted.

        `is_chain`: the target takes no branches, so that only the most probable child of each node may be verified.
        """
        self.tree = DraftTree()
        self._rate = rate
        self._is_chain = is_chain
        self._rates: list[float] = []  # of the nodes' votes
        self._probabilities: list[float] = []

    def __len__(self) -> int:
        return len(self.tree)

    @property
    def probabilities(self) -> list[float]:
        """Probabilities of the nodes that may be verified; none is higher than its parent's."""
        known = self._score()
        return [known[node] for node in self._list_path()] if self._is_chain else known

    def probability(self, node: int) -> float:
        return 1.0 if node < 0 else self._score()[node]

    def select(self, n: int) -> Draft:
        """The `n` most probable nodes. Their parents are among them, since no child is more probable."""
        return self.tree.select(self._choose(n))

    def path_tokens(self, n: int) -> list[int]:
        """Tokens of the most probable path among the `n` most probable nodes."""
        chosen = {*self._choose(n)}
        return [self.tree.tokens[node] for node in self._list_path() if node in chosen]

    def _choose(self, n: int) -> Sequence[int]:
        if self._is_chain:
            return self._list_path()[:n]
        if n >= len(self):
            return range(len(self))
        known = self._score()
        return nlargest(n, range(len(self)), key=lambda node: (known[node], -node))

    def _list_path(self) -> list[int]:
        """The most probable child of the root, its most probable child, and so on."""
        known, path = self._score(), [-1]
        while children := self.tree.children(path[-1]):
            path.append(max(children, key=lambda node: (known[node], -node)))
        return path[1:]

    def _score(self) -> list[float]:
        """[n]"""
        tree, rates, known = self.tree, self._rates, self._probabilities
        first = tree.take_changed()
        if first < len(tree) or len(known) > len(tree):
            del known[first:], rates[first:]
            rates += map(self._rate, tree.votes[first:])
            for node in range(first, len(tree)):
                parent, rate = tree.parents[node], rates[node]
                if len(siblings := tree.children(parent)) > 1:
                    rate = self._contest(node, siblings)
                known.append(rate * (1.0 if parent < 0 else known[parent]))
        return known

    def _contest(self, node: int, siblings: Sequence[int]) -> float:
        """The rate of `node` beside `siblings`: others, who propose other tokens instead, may be right.

        At most one token is right. Drafters that err independently are right about it with the odds p / (1 - p), of
        which p is what each gives its own tokens, against the odds of the others and of none.
        """
        rate, votes = self._rates[node], self.tree.votes
        own = votes[node]
        others: dict[str, float] = {}
        for each in siblings:
            name = next(iter(votes[each]))
            if name not in own and own.keys().isdisjoint(votes[each]):
                others[name] = others.get(name, 0.0) + self._rates[each]
        bounded = [min(each, _MAX_RATE) for each in others.values()]
        odds = sum([p / (1.0 - p) for p in bounded])
        return rate / (1.0 + (1.0 - rate) * odds)


# What a round is worth, and how many draft nodes are worth verifying.
#
#     value = expected tokens - price * seconds
#
# `price` is in tokens per second: the rate at which the time could emit tokens otherwise. To maximise tokens per second
# over many rounds is to maximise this difference in each of them (renewal reward; Dinkelbach 1967 for the ratio).


MAX_NODES = 63  # draft nodes; a forward then has at most 64 rows
_COUNTS = (*range(16), 19, 23, 27, 31, 39, 47, 55, MAX_NODES)  # that are compared: costs of more rows are interpolated


class DraftSize(NamedTuple):
    """A number of draft nodes to verify: tokens the round is expected to emit, and its seconds, drafting included."""

    nodes: int
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def value(self, price: float) -> float:
        """The value in tokens; `price` is in tokens per second."""
        return self.tokens - price * self.seconds


def list_counts(limit: int) -> list[int]:
    """The numbers of draft nodes up to `limit`, 0 included, that are compared.

    None up to 15 is skipped, since cost curves have steps in both directions.
    """
    counts = [*_COUNTS[: bisect_right(_COUNTS, limit)]]
    return counts if counts[-1] == limit else [*counts, limit]


def list_sizes(
    probabilities: Sequence[float], verify_s: Callable[[int], float], drafted_s: float, max_nodes: int
) -> list[DraftSize]:
    """Sizes up to `max_nodes`, each of the most probable nodes; `verify_s` maps rows of a forward to seconds."""
    tokens = list(accumulate(sorted(probabilities, reverse=True)[:max_nodes], initial=1.0))
    return [DraftSize(n, tokens[n], drafted_s + verify_s(n + 1)) for n in list_counts(len(tokens) - 1)]


def choose_size(candidates: Sequence[DraftSize], recent_rate: float) -> tuple[DraftSize, float]:
    """The size of the highest value, and the price of a second in tokens.

    The price is the higher of the best speed among `candidates` and `recent_rate`, the tokens per second of recent
    rounds. A token left out of this draft can still be drafted in the next round, when more of the text is known.
    """
    price = max(recent_rate, max([tokens / seconds for _, tokens, seconds in candidates]))
    return max(candidates, key=lambda each: each[1] - price * each[2]), price


_OBSERVED_WEIGHT = 0.75  # of the emitted tokens against the expected ones, when a round is judged
_LOOK_AHEAD = 4  # further units that have to be worth less before a drafter stops
_LEAST_REACH = 0.1  # probability of a path by a drafter's own confidences, below which its block need not go on
_MAX_DRAFTED = 15  # tokens on a path of a drafter that takes time, and of a lookup that may not be verified


@dataclass(slots=True)
class DrafterCall:
    """A drafter that takes time, what it is asked for in a round, and its units of work.

    window    tokens of the text's end that it may read
    n_read    tokens of the text that it has to read first
    gain      tokens that are expected to be gained by asking it
    is_trial  whether it is asked to be measured
    before    the size that was chosen without it
    size      the size that was chosen with it
    tree      what it proposes in, with the lookups where the target takes trees
    units     the tokens on a path that each of its units proposed
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
        self.seconds = cache(cost.seconds)  # of a forward by its rows, which are charged to this generation

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
        return choose_size(list_sizes(self.tree.probabilities, self.seconds, 0.0, self.limit.nodes), self.recent_rate)[
            0
        ]

    def find_fastest_size(self, tree: ScoredTree, ahead: Sequence[float] = (), more_s: float = 0.0) -> DraftSize:
        """The size of the most tokens per second, after `more_s` of drafting that adds nodes `ahead`."""
        seconds = self.drafting_s + more_s
        sizes = list_sizes([*tree.probabilities, *ahead], self.seconds, seconds, self.limit.nodes)
        return max(sizes, key=lambda each: each.speed)

    def measure_chain(self, tree: ScoredTree, ahead: Sequence[float] = (), more_s: float = 0.0) -> DraftSize:
        """The size of a whole drawn chain, after `more_s` of drafting that adds tokens of probabilities `ahead`."""
        n = len(tree) + len(ahead)
        seconds = self.drafting_s + more_s + self.seconds(n + 1)
        return DraftSize(n, 1.0 + sum(tree.probabilities) + sum(ahead), seconds)

    def gain(self, call: DrafterCall, step: Step) -> float:
        """Tokens gained by asking the drafter; the emitted tokens, which have to do with luck, count in part."""
        tokens = call.size.tokens + _OBSERVED_WEIGHT * (len(step.tokens) - call.size.tokens)
        seen = DraftSize(step.n_drafted, tokens, self.drafting_s + self.seconds(step.n_drafted + 1))
        return seen.value(self.price) - call.before.value(self.price)

    def ask_free(self, tree: ScoredTree) -> None:
        """Add what drafters that take no time propose, each up to where its next token would hardly be reached."""
        depth = min(self.limit.depth, max(self.max_nodes, _MAX_DRAFTED))
        for drafter in self._drafters.free:
            for _ in self._drafters.expand(drafter, tree.tree, self.tokens, Budget(depth, depth)):
                if tree.probability(tree.tree.deepest(drafter.name)) < LEAST_REACHED:
                    break

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
        """The probability from which on a path is worth a row of the draft's forward and one of the target's, taken
        that rows cost the draft as much more time as the target; 1 where only one path can be continued.
        """
        if self._is_chain or not drafter.grows_trees:
            return 1.0
        rows, whole = 1 + TREE_WIDTH, self._cost.model.seconds  # which other generations have no part in
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
