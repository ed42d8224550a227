"""One round of the autopilot: its limits, the drafters that it has asked, and the values of draft sizes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import accumulate
from typing import NamedTuple

from edgespec.controller.cost_model import MarginalCost
from edgespec.core.drafter import Drafter
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


def value(tokens: float, price: float, seconds: float) -> float:
    """Value of a round in tokens; `price` in tokens per second."""
    return tokens - price * seconds


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
        """In tokens; `price` in tokens per second."""
        return value(self.tokens, price, self.seconds)


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


@dataclass(slots=True)
class DrafterCall:
    """A drafter that takes time, and what it was asked for in a round.

    is_trial  whether that was to measure it
    after     the drafters that were asked before it
    n_read    tokens of the text that it had to read first
    before    the size that was chosen without it
    size      the size that was chosen with it
    units     the tokens on a path that each of its units proposed
    seen_s    measured seconds
    """

    drafter: Drafter
    is_trial: bool
    after: tuple[str, ...]
    n_read: int
    before: DraftSize
    size: DraftSize
    units: list[int] = field(default_factory=list)
    seen_s: float = 0.0


class RoundPlan:
    """Kept until the round's Step is recorded. Seconds are those of the cost model, but for `charged_s`."""

    def __init__(
        self,
        cost: MarginalCost,
        tokens: Sequence[int],
        limit: Budget,
        tokens_per_step: float,
    ) -> None:
        """`tokens` are prompt and output; the last one is the root. `tokens_per_step` is that of recent rounds."""
        self._cost = cost
        self.position = len(tokens) - 1  # of the root
        self.node_limit, self.depth_limit = min(limit.nodes, MAX_NODES), min(limit.depth, MAX_NODES)
        self.max_nodes = 0  # of the draft, by the regret budget; at most node_limit
        self.recent_rate = tokens_per_step / cost.seconds(1)  # tokens per second
        self.price = 0.0  # tokens per second
        self.asked: list[DrafterCall] = []
        self.silent: set[str] = set()  # drafters that had nothing to propose
        self._known: dict[int, float] = {}  # rows -> seconds

    def seconds(self, rows: int) -> float:
        """Seconds of a forward of `rows` rows that are charged to this generation."""
        found = self._known.get(rows)
        if found is None:
            found = self._known[rows] = self._cost.seconds(rows)
        return found

    @property
    def drafting_s(self) -> float:
        """Seconds of the units that drafters have been asked for, without reading."""
        return sum(map(self._usual_s, self.asked))

    @property
    def charged_s(self) -> float:
        """`drafting_s`, with the measured seconds of drafters that run ahead."""
        return sum(each.seen_s if each.drafter.runs_ahead else self._usual_s(each) for each in self.asked)

    def _usual_s(self, asked: DrafterCall) -> float:
        return sum(self._cost.model.unit_s(asked.drafter.name, n) for n in asked.units)

    def share_drafting(self, seconds: float) -> None:
        """Share the measured seconds of drafting out among the drafters, by what each was seen to take."""
        seen_s = sum(each.seen_s for each in self.asked)
        for each in self.asked:
            each.seen_s = seconds * (each.seen_s / seen_s if seen_s else 1.0 / len(self.asked))

    def profile_s(self, asked: DrafterCall) -> float:
        """Seconds of its units by the profile."""
        return sum(self._cost.model.predict_unit_s(asked.drafter.name, n) for n in asked.units)

    @property
    def reading_s(self) -> float:
        return sum(each.n_read * self._cost.model.read_s(each.drafter.name) for each in self.asked if each.units)

    def choose_size(self, tree: ScoredTree) -> DraftSize:
        """The size of the highest value within the regret budget; sets the price."""
        sizes = list_sizes(tree.probabilities, self.seconds, self.drafting_s, self.max_nodes)
        size, self.price = choose_size(sizes, self.recent_rate)
        return size

    def choose_unlimited_size(self, tree: ScoredTree) -> DraftSize:
        """The size of the highest value without the regret budget and without drafters that take time."""
        return choose_size(list_sizes(tree.probabilities, self.seconds, 0.0, self.node_limit), self.recent_rate)[0]

    def find_fastest_size(self, tree: ScoredTree, ahead: Sequence[float] = (), more_s: float = 0.0) -> DraftSize:
        """The size of the most tokens per second, after `more_s` of drafting that adds nodes `ahead`."""
        seconds = self.drafting_s + more_s
        sizes = list_sizes([*tree.probabilities, *ahead], self.seconds, seconds, self.node_limit)
        return max(sizes, key=lambda each: each.speed)

    def measure_chain(self, tree: ScoredTree, ahead: Sequence[float] = (), more_s: float = 0.0) -> DraftSize:
        """The size of a whole drawn chain, after `more_s` of drafting that adds tokens of probabilities `ahead`."""
        n = len(tree) + len(ahead)
        seconds = self.drafting_s + more_s + self.seconds(n + 1)
        return DraftSize(n, 1.0 + sum(tree.probabilities) + sum(ahead), seconds)

    def gains(self, step: Step) -> list[float]:
        """Tokens gained by asking each of `asked`, of which `step` is the outcome.

        The difference between the emitted and the expected tokens is shared out by what each was expected to add.
        """
        seconds = self.charged_s + self.seconds(step.n_drafted + 1)
        last = self.asked[-1].size
        surprise = value(
            last.tokens + _OBSERVED_WEIGHT * (len(step.tokens) - last.tokens), self.price, seconds
        ) - last.value(self.price)
        added = [max(each.size.tokens - each.before.tokens, 1e-6) for each in self.asked]
        return [
            each.size.value(self.price) - each.before.value(self.price) + surprise * part / sum(added)
            for each, part in zip(self.asked, added, strict=True)
        ]
