"""The controller that always drafts as much as it was told."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.protocols import NO_DRAFT, Budget, Decision, Draft, Drafter, Scores, Step, Verdict


class FixedBudget:
    """One drafter, the same budget at every step; depth 0 is plain decoding."""

    def __init__(self, drafter: Drafter, budget: Budget) -> None:
        self._drafter = drafter
        self._budget = budget
        self.expects_plain = not (budget.depth and budget.nodes)
        self.decision = Decision("none", "told to") if self.expects_plain else Decision(drafter.name, "told to")

    def begin(self, prompt: Sequence[int], scores: Scores) -> None:
        self._drafter.begin(prompt, scores)

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        budget = self._budget.clamp(depth=limit.depth, nodes=limit.nodes)
        return self._drafter.propose(tokens, budget) if budget.depth and budget.nodes else NO_DRAFT

    def observe(self, verdict: Verdict, scores: Scores) -> None:
        self._drafter.observe(verdict, scores)

    def record(self, step: Step) -> None:
        """Nothing to learn from."""

    def enter(self, passage: str) -> None:
        """All passages are drafted alike."""

    def complaint(self) -> str | None:
        return None
