"""Means of what is seen over time, in this text and in those before it."""

from __future__ import annotations

_GUESS_WEIGHT = 4.0  # observations that a guess counts for among all texts
_TRUST = 6.0  # observations that earlier texts count for in a new one, and one of them among them
_FORGOTTEN = 0.9  # discount of earlier texts, at every new one


class DecayedMean:
    """A discounted mean over the present text, drawn towards the mean of earlier texts, drawn towards a guess.

    A long text tells no more about the next one than a short one does: each counts for a few observations at most.
    """

    def __init__(self, guess: float, discount: float = 0.98) -> None:
        """`discount` of the present text's earlier evidence, at every new piece of it."""
        self._guess = guess
        self._discount = discount
        self._sum = self._n = 0.0
        self._earlier_sum = self._earlier_n = 0.0

    def fork(self) -> DecayedMean:
        """One for a new text, of which there may be several at a time; `merge` takes in what it has seen."""
        local = DecayedMean(self._guess, self._discount)
        local.restore(self.evidence)
        return local

    def merge(self, text: DecayedMean) -> None:
        """A text is over that began with `fork`."""
        if text._n:
            weight = min(text._n, _TRUST)
            self._earlier_sum = self._earlier_sum * _FORGOTTEN + text._sum / text._n * weight
            self._earlier_n = self._earlier_n * _FORGOTTEN + weight

    def observe(self, value: float) -> None:
        self._sum = self._sum * self._discount + value
        self._n = self._n * self._discount + 1

    @property
    def value(self) -> float:
        return (self._sum + _TRUST * self.prior) / (self._n + _TRUST)

    @property
    def prior(self) -> float:
        """The mean over earlier texts, drawn towards the guess."""
        return (self._earlier_sum + _GUESS_WEIGHT * self._guess) / (self._earlier_n + _GUESS_WEIGHT)

    @property
    def local(self) -> tuple[float, float]:
        """The mean over the present text alone, and how much evidence that is."""
        return (self._sum / self._n if self._n else 0.0), self._n

    @property
    def evidence(self) -> tuple[float, float]:
        """Weighted sum and weight of what all texts have shown, the present one included."""
        all_ = DecayedMean(self._guess)
        all_.restore((self._earlier_sum, self._earlier_n))
        all_.merge(self)
        return all_._earlier_sum, all_._earlier_n

    def restore(self, evidence: tuple[float, float]) -> None:
        """Go on from an earlier `evidence`."""
        self._earlier_sum, self._earlier_n = evidence
