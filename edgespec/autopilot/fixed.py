"""The controller of a fixed draft length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from edgespec.autopilot.drafter_set import DrafterSet
from edgespec.autopilot.scored_tree import ScoredTree
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter, TokenDraw
from edgespec.core.protocols import NO_DRAFT, Budget, Decision, Draft, Round, Step

_REASON = "the draft length is fixed"
_MIN_MATCH = 2.0  # tokens; a fixed length would seldom pay after shorter matches


class FixedLength:
    """The same budget in every round; without drafters, or with depth 0, plain decoding.

    For a chain, the first drafter that proposes something makes the draft; for a tree, all of them do.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        budget: Budget,
        vocab_size: int,
        draw: TokenDraw | None = None,
        takes_trees: Callable[[], bool] = lambda: True,
    ) -> None:
        """`vocab_size` is the target's; `draw` is given to drafters that can draw their tokens. `takes_trees` tells
        whether the target takes a tree in the next round; if not, the budget's depth limits its nodes.
        """
        self._drafters = DrafterSet(drafters, vocab_size, draw)
        self._budget = budget
        self._takes_trees = takes_trees
        self.expects_plain = not (drafters and budget.depth and budget.nodes)
        self._lengths = {drafter.name for drafter in drafters if drafter.confidence == "length"}
        self.decision = Decision("none", _REASON)
        self.failures = self._drafters.failures  # the drafters that were dropped, and why

    def begin(self, prompt: Sequence[int]) -> None:
        self._drafters.begin(prompt)

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        depth, nodes = min(self._budget.depth, limit.depth), min(self._budget.nodes, limit.nodes)
        is_chain = self._budget.nodes <= self._budget.depth or not self._takes_trees()
        budget = Budget(min(depth, nodes), min(depth, nodes)) if is_chain else Budget(depth, nodes)
        if not (depth and nodes):
            return self._decide(NO_DRAFT)
        scored = ScoredTree(self._rate, is_chain=is_chain)
        for drafter in self._drafters:
            if is_chain and (chain := self._drafters.draft_async(drafter, tokens, budget)) is not None:
                return self._decide(chain, drafter.name)
            tree = DraftTree() if drafter.is_drawn else scored.tree
            for _ in self._drafters.expand(drafter, tree, tokens, budget):
                pass
            if len(tree) and drafter.is_drawn:
                return self._decide(tree.drawn())
            if is_chain and (draft := self._select(scored, budget)) is not NO_DRAFT:
                return self._decide(draft)
        return self._decide(self._select(scored, budget))

    def observe(self, done: Round) -> None:
        self._drafters.observe(done, lambda drafter, outcomes: None)

    def record(self, step: Step) -> None:
        """Learns nothing."""

    def set_phase(self, phase: str) -> None:
        """Drafts alike in all phases."""

    def end(self) -> None:
        """Keeps nothing."""

    def _decide(self, draft: Draft, source: str = "") -> Draft:
        """`draft`; states who made it: `source`, or the drafters that its tokens name."""
        names = dict.fromkeys(name for each in draft.drafters for name in each.split("+"))
        self.decision = Decision(source or "+".join(names) or "none", _REASON)
        return draft

    def _select(self, scored: ScoredTree, budget: Budget) -> Draft:
        """The nodes of the most confident paths within `budget`."""
        return scored.select(min(budget.nodes, sum(each > 0 for each in scored.probabilities)))

    def _rate(self, votes: Mapping[str, float]) -> float:
        """A guess at the acceptance of a token; 0 after a short match."""
        return max(_as_rate(each, is_length=name in self._lengths) for name, each in votes.items())


def _as_rate(confidence: float, *, is_length: bool) -> float:
    if not is_length:
        return confidence
    return confidence / (confidence + 1.0) if confidence >= _MIN_MATCH else 0.0
