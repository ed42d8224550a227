"""Fills a round's draft tree: from drafters that take no time, then unit by unit from one that does."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from edgespec.controller.acceptance import LEAST_REACHED
from edgespec.controller.batch_cost import MarginalCost
from edgespec.controller.drafter_set import DrafterSet
from edgespec.controller.gate import DraftRequest
from edgespec.controller.round import Asked, RoundPlan
from edgespec.controller.scored_tree import ScoredTree
from edgespec.controller.stats import TextStats
from edgespec.core.drafter import Drafter
from edgespec.core.protocols import Budget

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
        self, request: DraftRequest, asked: Asked, tree: ScoredTree, tokens: Sequence[int], round_: RoundPlan
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

    def foretell_chain(self, drafter: Drafter, round_: RoundPlan) -> list[float]:
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
