"""Discounted means of observations, in the present text and over earlier texts."""

from __future__ import annotations

_GUESS_WEIGHT = 4.0  # observations that the initial guess counts for in the mean of earlier texts
_PRIOR_WEIGHT = 6.0  # observations that all earlier texts count for in a new one; also the most that one text adds
_TEXT_DISCOUNT = 0.9  # factor on the weight of earlier texts, at every new one


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
