"""The controller of a fixed draft length."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.protocols import NO_DRAFT, Budget, Decision, Draft, Drafter, Step, Verdict
from edgespec.core.scores import Scores


class FixedLength:
    """One drafter with the same budget in every round; depth 0 is plain decoding."""

    def __init__(self, drafter: Drafter, budget: Budget) -> None:
        self._drafter = drafter
        self._budget = budget
        self.expects_plain = not (budget.depth and budget.nodes)
        self.decision = Decision("none" if self.expects_plain else drafter.name, "the draft length is fixed")

    def begin(self, prompt: Sequence[int], scores: Scores) -> None:
        self._drafter.begin(prompt, scores)

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        budget = self._budget.clamp(depth=limit.depth, nodes=limit.nodes)
        return self._drafter.propose(tokens, budget) if budget.depth and budget.nodes else NO_DRAFT

    def observe(self, verdict: Verdict, scores: Scores) -> None:
        self._drafter.observe(verdict, scores)

    def record(self, step: Step) -> None:
        """Learns nothing."""

    def set_phase(self, phase: str) -> None:
        """Drafts alike in all phases."""

    def warning(self) -> str | None:
        return None

    def end(self) -> None:
        """Keeps nothing."""
