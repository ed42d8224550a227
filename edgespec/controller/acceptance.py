"""Acceptance rates of drafted tokens, learned in bins of one feature of the token."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from edgespec.core.drafter import Confidence
from edgespec.units import count

# Discounted means of observations, in the present text and over earlier texts.


_GUESS_WEIGHT = 4.0  # observations that the initial guess counts for in the mean of earlier texts
_PRIOR_WEIGHT = 6.0  # observations that earlier texts count for in a new one, and one text at most among them
_TEXT_DISCOUNT = 0.9  # of earlier texts, at every new one


class DecayedMean:
    """A discounted mean over the present text, shrunk towards the mean of earlier texts, itself shrunk to a guess.

    A long text says no more about the next one than a short one: each counts for `_PRIOR_WEIGHT` observations at most.
    """

    def __init__(self, guess: float, discount: float = 0.98) -> None:
        """`discount` is the factor on earlier observations of the present text at every new one."""
        self._guess = guess
        self._discount = discount
        self._sum = self._n = 0.0
        self._earlier_sum = self._earlier_n = 0.0
        self.prior = guess  # their mean, shrunk towards the guess

    def fork(self) -> DecayedMean:
        """A mean for a new text. Several may exist at a time; `merge` takes in what one has observed."""
        local = DecayedMean(self._guess, self._discount)
        local.restore(self.evidence)
        return local

    def merge(self, text: DecayedMean) -> None:
        """Take in `text`, a mean made by `fork`, when its text is complete."""
        if text._n:
            weight = min(text._n, _PRIOR_WEIGHT)
            self._earlier_sum = self._earlier_sum * _TEXT_DISCOUNT + text._sum / text._n * weight
            self._earlier_n = self._earlier_n * _TEXT_DISCOUNT + weight
            self._update_prior()

    def observe(self, value: float) -> None:
        self._sum = self._sum * self._discount + value
        self._n = self._n * self._discount + 1

    @property
    def value(self) -> float:
        return (self._sum + _PRIOR_WEIGHT * self.prior) / (self._n + _PRIOR_WEIGHT)

    @property
    def local(self) -> tuple[float, float]:
        """The mean over the present text alone, and its discounted number of observations."""
        return (self._sum / self._n if self._n else 0.0), self._n

    @property
    def evidence(self) -> tuple[float, float]:
        """Weighted sum and weight of all texts, the present one included."""
        if not self._n:
            return self._earlier_sum, self._earlier_n
        merged = DecayedMean(self._guess)
        merged.restore((self._earlier_sum, self._earlier_n))
        merged.merge(self)
        return merged._earlier_sum, merged._earlier_n

    def restore(self, evidence: tuple[float, float]) -> None:
        """Continue from an earlier `evidence`."""
        self._earlier_sum, self._earlier_n = evidence
        self._update_prior()

    def _update_prior(self) -> None:
        total, weight = self._earlier_sum, self._earlier_n
        self.prior = (total + _GUESS_WEIGHT * self._guess) / (weight + _GUESS_WEIGHT)


class RecentRate:
    """What recent rounds have emitted and drafted. Short discounts, since a text moves from one phase to another."""

    def __init__(self) -> None:
        self._tokens = DecayedMean(1.0, 0.8)
        self._steps = DecayedMean(1.0, 0.8)
        self._drafted = DecayedMean(0.0, 0.9)

    def observe(self, tokens: int, steps: float, *, drafted: bool) -> None:
        """A round emitted `tokens` in a usual time of `steps` plain steps."""
        self._tokens.observe(tokens)
        self._steps.observe(steps)
        self._drafted.observe(float(drafted))

    @property
    def tokens_per_step(self) -> float:
        """Tokens per plain step; at least 1, the rate of plain decoding."""
        return max(1.0, self._tokens.value / self._steps.value)

    @property
    def drafted_share(self) -> float:
        """Share of rounds with a draft."""
        return self._drafted.value


LEAST_REACHED = 0.03  # probability that the next token of a chain is reached
_KEPT = 0.8  # weight of an answer beside the next one
_LOW = 0.5
_MANY_ANSWERS, _MANY_TESTED = 20, 200  # from which on a low share is no accident


@dataclass(frozen=True, slots=True)
class AcceptanceRecord:
    """How often the best proposals of a drafter were accepted in all answers that it was asked for.

    recent   the share in the last answers; each counts `_KEPT` times as much as the next one
    is_told  whether the user has heard that it is low
    """

    answers: int = 0
    accepted: int = 0
    tested: int = 0
    recent: float = 0.0
    is_told: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for counts that cannot be."""
        if not (0 <= self.accepted <= self.tested and 0 <= self.answers <= self.tested and 0 <= self.recent <= 1):
            raise ValueError("more tokens accepted than tested")

    @property
    def share(self) -> float:
        """The share of accepted tokens in all answers."""
        return self.accepted / self.tested if self.tested else 0.0

    @property
    def is_low(self) -> bool:
        """Whether many answers show that less than half of the tokens are accepted."""
        return self.answers >= _MANY_ANSWERS and self.tested >= _MANY_TESTED and self.share < _LOW

    def add(self, accepted: int, tested: int) -> AcceptanceRecord:
        """The record with one more answer, in which `accepted` of `tested` tokens were accepted."""
        share = accepted / tested
        recent = _KEPT * self.recent + (1 - _KEPT) * share if self.answers else share
        counts = self.answers + 1, self.accepted + accepted, self.tested + tested
        return AcceptanceRecord(*counts, recent, self.is_told)

    def describe(self, name: str) -> str:
        """A sentence for the user about the drafter that he calls `name`, without its full stop."""
        return f"drafts of {name} are accepted {self.share:.0%} of the time over {count(self.answers, 'answer')}"


class AcceptanceModel:
    """The share of accepted tokens as a function of one feature.

    The feature is the drafter's confidence.
    """

    def __init__(self, edges: Sequence[float], guesses: Sequence[float]) -> None:
        """`edges` separate the bins; `guesses` [len(edges) + 1] are their rates before any observation."""
        self._edges = edges
        self.rates = [DecayedMean(guess) for guess in guesses]

    def fork(self) -> AcceptanceModel:
        """A model for a new text, see DecayedMean."""
        local = copy(self)
        local.rates = [rate.fork() for rate in self.rates]
        return local

    def merge(self, text: AcceptanceModel) -> None:
        """Take in `text`, made by `fork`."""
        for rate, seen in zip(self.rates, text.rates, strict=True):
            rate.merge(seen)

    def observe(self, feature: float, is_right: bool) -> None:
        self.rates[bisect_right(self._edges, feature)].observe(float(is_right))

    def rate(self, feature: float) -> float:
        return self.rates[bisect_right(self._edges, feature)].value


def make_acceptance_model(confidence: Confidence) -> AcceptanceModel:
    """Returns a model for a drafter that gives each token a probability, or the number of matching tokens before it."""
    if confidence == "length":
        rates = [0.1, 0.4, 0.5, 0.6, 0.65, 0.75, 0.85, 0.9, 0.95]
        return AcceptanceModel([2, 3, 4, 5, 7, 11, 17, 32], rates)
    edges = [0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97]
    return AcceptanceModel(edges, [0.01, 0.03, 0.07, 0.14, 0.27, 0.42, 0.57, 0.72, 0.85, 0.93, 0.98])
