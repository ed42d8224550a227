"""The controller that always drafts as much as it was told, and the switch in front of any controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.core.protocols import NO_DRAFT, Budget, Controller, Decision, Draft, Drafter, Scores, Step, Verdict


class FixedLength:
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

    def set_phase(self, phase: str) -> None:
        """All passages are drafted alike."""

    def warning(self) -> str | None:
        return None

    def end(self) -> None:
        """Nothing to keep."""


class Switchable:
    """Another controller, which is given no room for drafts while `is_paused` says so, and goes on following the text.

    When it may draft does not depend on what was drawn, so the law of the output stays the target's.
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
        if self._is_paused():
            draft = self._controller.propose(tokens, Budget(0, 0))
            self.decision = Decision("none", "speculation is switched off")
            return draft
        draft = self._controller.propose(tokens, limit)
        self.decision = self._controller.decision
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
