"""One round: its limits, the draft model's candidates, and the values of draft sizes."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.controller.batch_cost import MarginalCost
from edgespec.controller.draft_tree import DraftTree
from edgespec.controller.value import DraftSize, choose_size, list_sizes, value
from edgespec.core.protocols import Budget, Step
from edgespec.drafters.draft_model import Candidates

_MAX_NODES = 15  # draft nodes; a forward then has at most 16 rows
_OBSERVED_WEIGHT = 0.75  # of the emitted tokens against the expected ones, when a round is judged


class Round:
    """Kept until the round's Step is recorded. Seconds are the usual ones of the cost model, not measured ones."""

    def __init__(self, cost: MarginalCost, tokens: Sequence[int], limit: Budget, tokens_per_step: float) -> None:
        """`tokens` are prompt and output; the last one is the root. `tokens_per_step` is that of recent rounds."""
        self._cost = cost
        self.position = len(tokens) - 1  # of the root
        self.node_limit, self.depth_limit = min(limit.nodes, _MAX_NODES), min(limit.depth, _MAX_NODES)
        self.max_nodes = 0  # of the draft, by the regret budget; at most node_limit
        self.recent_rate = tokens_per_step / cost.seconds(1)  # tokens per second
        self.price = 0.0  # tokens per second
        self.path: list[Candidates] = []  # what the draft model proposed at each depth
        self.n_read = 0  # tokens of the text that the draft model had to read first
        self.value_without = 0.0  # of the round without the draft model, in tokens
        self.expected_tokens = 0.0  # of the round with it

    @property
    def drafted_s(self) -> float:
        """Seconds of the tokens that the draft model has drafted."""
        return len(self.path) * self._cost.model.draft_s if self.path else 0.0

    def choose_size(self, tree: DraftTree) -> DraftSize:
        """The size of the highest value within the regret budget; sets the price."""
        sizes = list_sizes(tree.probabilities, self._cost.seconds, self.drafted_s, self.max_nodes)
        size, self.price = choose_size(sizes, self.recent_rate)
        return size

    def choose_unlimited_size(self, tree: DraftTree) -> DraftSize:
        """The size of the highest value if the regret budget did not matter and the draft model were not asked."""
        return choose_size(list_sizes(tree.probabilities, self._cost.seconds, 0.0, self.node_limit), self.recent_rate)[
            0
        ]

    def find_fastest_size(self, tree: DraftTree, ahead: Sequence[float]) -> DraftSize:
        """The size of the most tokens per second, after drafting more tokens with probabilities `ahead`."""
        drafted_s = self.drafted_s + len(ahead) * self._cost.model.draft_s
        sizes = list_sizes([*tree.probabilities, *ahead], self._cost.seconds, drafted_s, self.node_limit)
        return max(sizes, key=lambda each: each.speed)

    def measure_chain(self, chain: DraftTree, ahead: Sequence[float] = ()) -> DraftSize:
        """The size of a whole sampled chain, after drafting more tokens with probabilities `ahead`."""
        n, drafted_s = len(chain) + len(ahead), self.drafted_s + len(ahead) * self._cost.model.draft_s
        return DraftSize(n, 1.0 + sum(chain.probabilities) + sum(ahead), drafted_s + self._cost.seconds(n + 1))

    def gain(self, step: Step) -> float:
        """Tokens gained by asking the draft model, of which `step` is the outcome."""
        emitted = self.expected_tokens + _OBSERVED_WEIGHT * (len(step.tokens) - self.expected_tokens)
        seconds = self.drafted_s + self._cost.seconds(step.n_drafted + 1)
        return value(emitted, self.price, seconds) - self.value_without
