"""Discounted means of observations, in the present text and over earlier texts."""

from __future__ import annotations

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
        self._prior = guess  # their mean, shrunk towards the guess

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

    def observe_often(self, value: float, n: int) -> None:
        """Observe `value` `n` times."""
        kept = self._discount**n
        weight = (1.0 - kept) / (1.0 - self._discount)
        self._sum = self._sum * kept + value * weight
        self._n = self._n * kept + weight

    @property
    def value(self) -> float:
        return (self._sum + _PRIOR_WEIGHT * self._prior) / (self._n + _PRIOR_WEIGHT)

    @property
    def prior(self) -> float:
        """The mean over earlier texts, shrunk towards the guess."""
        return self._prior

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
        self._prior = (total + _GUESS_WEIGHT * self._guess) / (weight + _GUESS_WEIGHT)


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

    def observe_plain(self, n: int) -> None:
        """`n` rounds went by without a draft."""
        self._tokens.observe_often(1.0, n)
        self._steps.observe_often(1.0, n)
        self._drafted.observe_often(0.0, n)

    @property
    def tokens_per_step(self) -> float:
        """Tokens per plain step; at least 1, the rate of plain decoding."""
        return max(1.0, self._tokens.value / self._steps.value)

    @property
    def drafted_share(self) -> float:
        """Share of rounds with a draft."""
        return self._drafted.value
