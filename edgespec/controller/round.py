"""One round of the autopilot: its limits, the drafters that it has asked, and the values of draft sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgespec.controller.batch_cost import MarginalCost
from edgespec.controller.own_time import Kind
from edgespec.controller.scored_tree import ScoredTree
from edgespec.controller.value import MAX_NODES, DraftSize, choose_size, list_sizes, value
from edgespec.core.drafter import Drafter
from edgespec.core.protocols import Budget, Step

_OBSERVED_WEIGHT = 0.75  # of the emitted tokens against the expected ones, when a round is judged


@dataclass(slots=True)
class Asked:
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
        kind: Kind = "decide",
    ) -> None:
        """`tokens` are prompt and output; the last one is the root. `tokens_per_step` is that of recent rounds."""
        self._cost = cost
        self.kind = kind
        self.position = len(tokens) - 1  # of the root
        self.node_limit, self.depth_limit = min(limit.nodes, MAX_NODES), min(limit.depth, MAX_NODES)
        self.max_nodes = 0  # of the draft, by the regret budget; at most node_limit
        self.recent_rate = tokens_per_step / cost.seconds(1)  # tokens per second
        self.price = 0.0  # tokens per second
        self.asked: list[Asked] = []
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

    def _usual_s(self, asked: Asked) -> float:
        return sum(self._cost.model.unit_s(asked.drafter.name, n) for n in asked.units)

    def share_drafting(self, seconds: float) -> None:
        """Share the measured seconds of drafting out among the drafters, by what each was seen to take."""
        seen_s = sum(each.seen_s for each in self.asked)
        for each in self.asked:
            each.seen_s = seconds * (each.seen_s / seen_s if seen_s else 1.0 / len(self.asked))

    def profile_s(self, asked: Asked) -> float:
        """Seconds of its units by the profile."""
        return sum(self._cost.model.foresee_unit_s(asked.drafter.name, n) for n in asked.units)

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
