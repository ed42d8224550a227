"""The decision whether a round asks the draft model, and how much of the text it may read first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.controller.batch_cost import MarginalCost
from edgespec.controller.regret import RegretBudget
from edgespec.controller.round import Round
from edgespec.controller.stats import ModelStats
from edgespec.controller.value import DraftSize
from edgespec.drafters.draft_model import DraftModelStepper

_MIN_WINDOW = 16  # tokens of context; with fewer a draft model is not asked
_AMORTIZED_ROUNDS = 64  # rounds over which the draft model has to earn the time of its reading
_TOKENS_PER_ROUND = 2.0  # emitted where drafting pays; estimates the rounds that are left of a text
_READ_SHARE = 0.03  # plain steps for each emitted token that reading may take, in addition to the regret budget


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """Ask the draft model: why, how many tokens of the text's end it may read, and how many of them are unread."""

    reason: str
    window: int
    n_read: int


class ModelGate:
    """For the draft model of one generation."""

    def __init__(self, cost: MarginalCost, regret: RegretBudget, stepper: DraftModelStepper) -> None:
        self._cost = cost
        self._regret = regret
        self._stepper = stepper
        self._prompt_length = 0

    def begin(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length

    def decide(
        self, round_: Round, tokens: Sequence[int], remaining: int, stats: ModelStats, lookup: DraftSize
    ) -> ModelRequest | None:
        """Ask if the expected gain exceeds the price of the reading, spread over the rounds to come.

        `remaining` is the number of tokens that the text may still get, `lookup` the size chosen without the model.
        A model that does not pay is asked from time to time, in rounds without a lookup, to measure it again.
        """
        costs = self._cost.model
        if not round_.max_nodes:
            return None
        window = self._max_window(tokens)
        if window < _MIN_WINDOW:
            return None
        n_read = min(window, self._stepper.lag(tokens)) - 1
        read_s = n_read * costs.read_s
        rounds = min(_AMORTIZED_ROUNDS, remaining / _TOKENS_PER_ROUND)
        if stats.gain(self._cost.n_peers).value > round_.price * read_s / rounds:
            stats.exploration.reset()
            return ModelRequest("the draft model is expected to win the most tokens per second", window, n_read)
        if lookup.nodes or not stats.exploration.spend((costs.draft_s + read_s) / self._cost.seconds(1)):
            return None
        return ModelRequest("to measure the draft model again", window, n_read)

    def _max_window(self, tokens: Sequence[int]) -> int:
        """Tokens that the draft model may read: as many as the regret budget and a share of the output pay for."""
        read_s = self._cost.model.read_s
        if not read_s:
            return len(tokens)
        steps = self._regret.allowance(self._cost.n_peers) + _READ_SHARE * (len(tokens) - self._prompt_length)
        return int(steps * self._cost.seconds(1) / read_s)
