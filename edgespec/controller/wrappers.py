"""Controllers around another one: a switch that pauses it, and drafts that a grammar forces in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from edgespec.core.protocols import Budget, Controller, Decision, Draft, Round, Step

_MAX_FORCED = 16  # tokens of one jump-forward draft


class ControllerWrapper:
    """A Controller that passes every call on."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.decision = controller.decision

    @property
    def expects_plain(self) -> bool:
        return self._controller.expects_plain

    def announce(self, prompt: Sequence[int]) -> None:
        self._controller.announce(prompt)

    def begin(self, prompt: Sequence[int]) -> None:
        self._controller.begin(prompt)

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        draft = self._controller.propose(tokens, limit)
        self.decision = self._controller.decision
        return draft

    def observe(self, done: Round) -> None:
        self._controller.observe(done)

    def record(self, step: Step) -> None:
        self._controller.record(step)

    def set_phase(self, phase: str) -> None:
        self._controller.set_phase(phase)

    @property
    def failures(self) -> Mapping[str, str]:
        return self._controller.failures

    def warning(self) -> str | None:
        return self._controller.warning()

    def end(self) -> None:
        self._controller.end()


class Switchable(ControllerWrapper):
    """A controller whose limit is zero while `is_paused` returns true; it still follows the text.

    `is_paused` must not depend on sampled tokens, so that the output keeps the target's distribution.
    """

    def __init__(self, controller: Controller, is_paused: Callable[[], bool]) -> None:
        super().__init__(controller)
        self._is_paused = is_paused

    @property
    def expects_plain(self) -> bool:
        return self._is_paused() or self._controller.expects_plain

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        if not self._is_paused():
            return super().propose(tokens, limit)
        draft = self._controller.propose(tokens, Budget(0, 0))
        self.decision = Decision("none", "speculation is switched off")
        return draft


class JumpForward(ControllerWrapper):
    """A controller, except where a grammar forces the next tokens: those are the draft, without a drafter
    (SGLang: jump-forward; llguidance: fast-forward tokens).

    As many are drafted as give the most tokens/s by `seconds`, the cost of a forward by its rows.
    """

    def __init__(
        self,
        controller: Controller,
        forced: Callable[[Sequence[int]], list[int] | None],
        seconds: Callable[[int], float],
    ) -> None:
        """`forced` returns the tokens that have to follow a text, None where no grammar applies."""
        super().__init__(controller)
        self._forced = forced
        self._seconds = seconds
        self._is_forced = False
        self._is_free = False

    @property
    def expects_plain(self) -> bool:
        return self._is_free and self._controller.expects_plain

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        forced = self._forced(tokens)
        self._is_free = forced is None
        if forced:
            forced = forced[: min(_MAX_FORCED, limit.depth, limit.nodes)]
            forced = forced[: max(range(len(forced) + 1), key=lambda n: (n + 1) / self._seconds(n + 1))]
        self._is_forced = bool(forced)
        if not forced:
            return super().propose(tokens, limit)
        self.decision = Decision("structure", "the grammar forces these tokens", len(forced) + 1.0)
        return Draft.chain(forced)

    def record(self, step: Step) -> None:
        if not self._is_forced:
            super().record(step)
