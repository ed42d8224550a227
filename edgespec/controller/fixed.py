"""The controller of a fixed draft length, and the switch that pauses any controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.core.protocols import NO_DRAFT, Budget, Controller, Decision, Draft, Drafter, Step, Verdict
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


class Switchable:
    """Another controller, whose limit is zero while `is_paused` returns true; it still follows the text.

    `is_paused` must not depend on sampled tokens, so that the output keeps the target's distribution.
    """

    def __init__(self, controller: Controller, is_paused: Callable[[], bool]) -> None:
        self._controller = controller
        self._is_paused = is_paused
        self.decision = controller.decision

    @property
    def expects_plain(self) -> bool:
        return self._is_paused() or self._controller.expects_plain

    def begin(self, prompt: Sequence[int], scores: Scores) -> None:
        self._controller.begin(prompt, scores)

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        is_paused = self._is_paused()
        draft = self._controller.propose(tokens, Budget(0, 0) if is_paused else limit)
        self.decision = Decision("none", "speculation is switched off") if is_paused else self._controller.decision
        return draft

    def observe(self, verdict: Verdict, scores: Scores) -> None:
        self._controller.observe(verdict, scores)

    def record(self, step: Step) -> None:
        self._controller.record(step)

    def set_phase(self, phase: str) -> None:
        self._controller.set_phase(phase)

    def warning(self) -> str | None:
        return self._controller.warning()

    def end(self) -> None:
        self._controller.end()
