"""Acceptance rates of drafted tokens, learned in bins of one feature of the token."""

from __future__ import annotations

from bisect import bisect_right
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
        self.restore((0.0, 0.0))

    def merge(self, text: DecayedMean) -> None:
        """Take in `text`, which was restored from the evidence of this mean, when its text is complete."""
        self.restore(self._weigh_in(text))

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
        return self._weigh_in(self)

    def restore(self, evidence: tuple[float, float]) -> None:
        """Continue from an earlier `evidence`."""
        self._earlier = total, weight = evidence
        self.prior = (total + _GUESS_WEIGHT * self._guess) / (weight + _GUESS_WEIGHT)  # the mean of earlier texts

    def _weigh_in(self, text: DecayedMean) -> tuple[float, float]:
        """The evidence of earlier texts and of `text`."""
        total, weight = self._earlier
        if not text._n:
            return total, weight
        added = min(text._n, _PRIOR_WEIGHT)
        return total * _TEXT_DISCOUNT + text._sum / text._n * added, weight * _TEXT_DISCOUNT + added


LEAST_REACHED = 0.03  # probability that the next token of a chain is reached
_KEPT = 0.8  # weight of an answer beside the next one
_LOW, _HOPELESS = 0.5, 0.05  # below the latter a draft model probably does not belong to the target
_MANY_ANSWERS, _MANY_TESTED = 20, 200  # from which on a low share is no accident
_ENOUGH_TESTED = 20  # likewise for a hopeless one


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
        """Whether many answers show that less than half of the tokens are accepted, or some that hardly any are."""
        if self.tested >= _ENOUGH_TESTED and self.share < _HOPELESS:
            return True
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


_BINS: dict[Confidence, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "probability": (
        (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97),
        (0.01, 0.03, 0.07, 0.14, 0.27, 0.42, 0.57, 0.72, 0.85, 0.93, 0.98),
    ),
    "length": ((2, 3, 4, 5, 7, 11, 17, 32), (0.1, 0.4, 0.5, 0.6, 0.65, 0.75, 0.85, 0.9, 0.95)),
}
"""The edges between bins of a drafter's confidence, and the rate of each bin before any observation."""


class AcceptanceModel:
    """The share of accepted tokens as a function of the drafter's confidence, which is a probability, or the number of
    matching tokens.
    """

    def __init__(self, confidence: Confidence) -> None:
        self._edges, guesses = _BINS[confidence]
        self.rates = [DecayedMean(guess) for guess in guesses]

    def observe(self, feature: float, is_right: bool) -> None:
        self.rates[bisect_right(self._edges, feature)].observe(float(is_right))

    def rate(self, feature: float) -> float:
        return self.rates[bisect_right(self._edges, feature)].value
