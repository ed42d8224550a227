"""The controller of a fixed draft length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from edgespec.controller.drafter_set import DrafterSet
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
        min_length: int = 0,
    ) -> None:
        """`vocab_size` is the target's; `draw` is given to drafters that can draw their tokens. Drafts of fewer than
        `min_length` tokens are left out, except drawn ones: what is left out must not depend on what was drawn.
        """
        self._drafters = DrafterSet(drafters, vocab_size, draw)
        self._budget = budget
        self._min_length = min_length
        self.expects_plain = not (drafters and budget.depth and budget.nodes)
        self._lengths = {drafter.name for drafter in drafters if drafter.confidence == "length"}
        self.decision = Decision("none", _REASON)

    @property
    def failures(self) -> Mapping[str, str]:
        """The drafters that were dropped, and why."""
        return self._drafters.failures

    def announce(self, prompt: Sequence[int]) -> None:
        self._drafters.announce(prompt)

    def begin(self, prompt: Sequence[int]) -> None:
        self._drafters.begin(prompt)

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        draft = self._propose(tokens, limit)
        is_short = draft.q is None and 0 < len(draft) < self._min_length
        return self._decide(NO_DRAFT) if is_short else draft

    def _propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        budget = self._budget.clamp(depth=limit.depth, nodes=limit.nodes)
        if not (budget.depth and budget.nodes):
            return self._decide(NO_DRAFT)
        is_chain = budget.nodes <= budget.depth
        if is_chain:  # a drawn or unread one is taken whole
            budget = replace(budget, depth=budget.nodes)
        tree = DraftTree()
        for drafter in self._drafters:
            if is_chain and (chain := self._drafters.draft_unread(drafter, tokens, budget)) is not None:
                return self._decide(chain, drafter.name)
            own = DraftTree() if drafter.is_drawn else tree
            for _ in self._drafters.expand(drafter, own, tokens, budget):
                pass
            if len(own) and drafter.is_drawn:
                return self._decide(own.drawn_chain())
            if is_chain and (draft := self._select(tree, budget, is_chain=True)) is not NO_DRAFT:
                return self._decide(draft)
        return self._decide(self._select(tree, budget, is_chain=is_chain))

    def observe(self, done: Round) -> None:
        self._drafters.observe(done, lambda drafter, outcomes: None)

    def record(self, step: Step) -> None:
        """Learns nothing."""

    def set_phase(self, phase: str) -> None:
        """Drafts alike in all phases."""

    def warning(self) -> str | None:
        return None

    def end(self) -> None:
        """Keeps nothing."""

    def _decide(self, draft: Draft, source: str = "") -> Draft:
        """State who made `draft`: `source`, or the drafters that its tokens name."""
        names = dict.fromkeys(name for each in draft.sources for name in each.split("+"))
        self.decision = Decision(source or "+".join(names) or "none", _REASON)
        return draft

    def _select(self, tree: DraftTree, budget: Budget, *, is_chain: bool) -> Draft:
        """The nodes of the most confident paths within `budget`; of a chain each node's best child alone."""
        scores: list[float] = []
        for parent, votes in zip(tree.parents, tree.votes, strict=True):
            above = 1.0 if parent < 0 else scores[parent]
            scores.append(above * max(_as_rate(c, is_length=name in self._lengths) for name, c in votes.items()))
        ranked = sorted(range(len(tree)), key=lambda node: (-scores[node], node))
        kept: list[int] = []
        for node in ranked:
            is_taken = is_chain and any(tree.parents[each] == tree.parents[node] for each in kept)
            is_reached = tree.parents[node] < 0 or tree.parents[node] in kept
            if scores[node] > 0 and is_reached and not is_taken and tree.depths[node] <= budget.depth:
                kept.append(node)
        return tree.select(kept[: budget.nodes])


def _as_rate(confidence: float, *, is_length: bool) -> float:
    """A guess at the acceptance of a token; 0 after a short match."""
    if not is_length:
        return confidence
    return confidence / (confidence + 1.0) if confidence >= _MIN_MATCH else 0.0
