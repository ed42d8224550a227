"""The controller that decides each round how much to draft, from measured cost and acceptance; nothing is an option.

The best depth k maximises expected tokens over expected seconds, E_k / (D(k) + T(k + 1)), over every k: cost curves
have cliffs and steps down, so a search that stops at the first loss stops too early (renewal reward). A ledger holds
the time lost against plain decoding of the same tokens, and forbids drafting while more is lost than is allowed. When
drafting is off, it is tried again after 16 tokens, then 32, and so on up to 256. What plain decoding costs is always
measured, never inferred from drafted rounds: a few rounds are plain for that alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from edgespec.core.acceptance import Acceptance
from edgespec.core.cost import CostCurve
from edgespec.core.protocols import Budget, Step

_ALLOWED_SHARE = 0.01  # of all time, that drafting may have lost against plain decoding
_ALLOWED_STEPS = 2.0  # plain steps that it may have lost beside
_PLAIN_ROUNDS = 3  # measured ones that have to count at any time
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256  # tokens


@dataclass(frozen=True, slots=True)
class Decision:
    """What was chosen for a round and why; `expected_rate` and `plain_rate` are tokens a second."""

    depth: int
    reason: str
    expected_tokens: float
    expected_rate: float
    plain_rate: float


class Autopilot:
    """A Controller for chains of one drafter. `decision` explains the last budget."""

    def __init__(self, costs: CostCurve, draft_s: float, most_depth: int) -> None:
        """`draft_s`: seconds a drafted token is expected to cost, until some have been drafted."""
        self._costs = costs
        self._draft_s = [draft_s]
        self._most_depth = most_depth
        self._acceptance = Acceptance()
        self._lead_s = 0.0  # of drafted rounds over plain ones for the same tokens
        self._elapsed_s = 0.0
        self._pause = _FIRST_PAUSE
        self._since_drafted = 0
        self.decision = Decision(0, "nothing decided yet", 1.0, 0.0, 0.0)

    def budget(self) -> Budget:
        self.decision = self._decide()
        return Budget(self.decision.depth, self.decision.depth)

    def record(self, step: Step) -> None:
        rows = step.n_drafted + 1
        self._costs.observe(rows, step.verify_s + step.sample_s + step.commit_s)
        self._elapsed_s += step.draft_s + step.verify_s + step.sample_s + step.commit_s
        if not step.n_drafted:
            self._since_drafted += len(step.tokens)
            return
        self._since_drafted = 0
        self._draft_s = [*self._draft_s[-14:], step.draft_s / step.n_drafted]
        self._acceptance.observe(step.n_accepted, step.n_tested)
        # What such a round usually takes, not what this one took: a busy machine would have slowed plain decoding too.
        usual_s = step.n_drafted * median(self._draft_s) + self._costs.seconds(rows)
        self._lead_s += len(step.tokens) * self._costs.seconds(1) - usual_s

    def _decide(self) -> Decision:
        plain_rate = 1 / self._costs.seconds(1)
        if self._costs.known(1) < _PLAIN_ROUNDS:
            return Decision(0, "to measure plain decoding", 1.0, plain_rate, plain_rate)
        best, tokens, rate = self._best()
        if self._lead_s < -(_ALLOWED_SHARE * self._elapsed_s + _ALLOWED_STEPS / plain_rate):
            return Decision(0, "drafting has lost more time than it may", 1.0, plain_rate, plain_rate)
        if best:
            self._pause = _FIRST_PAUSE
            return Decision(best, "the most tokens a second", tokens, rate, plain_rate)
        if self._since_drafted < self._pause:
            return Decision(0, "no draft is expected to pay", 1.0, plain_rate, plain_rate)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return Decision(1, "tried again after a pause", 1 + self._acceptance.rates(1)[0], plain_rate, plain_rate)

    def _best(self) -> tuple[int, float, float]:
        """Depth, expected tokens, and expected tokens a second of the best budget."""
        draft_s = median(self._draft_s)
        best = (0, 1.0, 1 / self._costs.seconds(1))
        expected, reached = 1.0, 1.0
        for depth, rate in enumerate(self._acceptance.rates(self._most_depth), 1):
            reached *= rate
            expected += reached
            per_second = expected / (depth * draft_s + self._costs.seconds(depth + 1))
            if per_second > best[2]:
                best = (depth, expected, per_second)
        return best
