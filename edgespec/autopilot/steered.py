"""A controller around another one: a switch that pauses it, and drafts that a grammar forces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from edgespec.core.protocols import Budget, Controller, Decision, Draft, Step

_MAX_FORCED = 16  # tokens of one jump-forward draft


class SteeredController:
    """Leaves the draft to another controller, except where a grammar forces the next tokens: then these are the draft,
    without a drafter (SGLang: jump-forward; llguidance: fast-forward tokens).

    As many are drafted as give the most tokens/s. While it is paused nothing is drafted, and the other controller still
    follows the text.
    """

    def __init__(
        self,
        controller: Controller,
        is_paused: Callable[[], bool] = lambda: False,
        forced: Callable[[Sequence[int]], list[int] | None] | None = None,
        seconds: Callable[[int], float] = lambda rows: 1.0,
    ) -> None:
        """`is_paused` must not depend on sampled tokens, so that the output keeps the target's distribution. `forced`
        returns the tokens that have to follow a text, None if no grammar applies. `seconds` is the time of a forward
        by its rows.
        """
        self.decision = controller.decision
        self._controller = controller
        self._is_paused = is_paused
        self._forced = forced
        self._seconds = seconds
        self._n_forced = 0
        self._is_free = True  # whether no grammar applies
        self.begin, self.observe, self.end = controller.begin, controller.observe, controller.end
        self.set_phase = controller.set_phase

    @property
    def expects_plain(self) -> bool:
        return self._is_paused() or (self._is_free and self._controller.expects_plain)

    @property
    def failures(self) -> Mapping[str, str]:
        return self._controller.failures

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        is_paused = self._is_paused()
        forced = self._forced(tokens) if self._forced is not None else None
        self._is_free = forced is None
        forced = [] if is_paused else (forced or [])[: min(_MAX_FORCED, limit.depth, limit.nodes)]
        if forced:
            forced = forced[: max(range(len(forced) + 1), key=lambda n: (n + 1) / self._seconds(n + 1))]
        self._n_forced = len(forced)
        if forced:
            self.decision = Decision("structure", "the grammar forces these tokens", len(forced) + 1.0)
            return Draft.chain(forced)
        draft = self._controller.propose(tokens, Budget(0, 0) if is_paused else limit)
        self.decision = self._controller.decision
        if is_paused:
            self.decision = Decision("none", "speculation is switched off")
        return draft

    def record(self, step: Step) -> None:
        if not self._n_forced:
            self._controller.record(step)
