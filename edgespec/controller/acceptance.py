"""From what a drafter says of itself to how often it is right: learned rates in bins."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from edgespec.controller.estimator import DecayedMean


class AcceptanceModel:
    """The share of right tokens as a function of one number.

    For a draft model the number is the probability it gives its token; for lookups, the length of the match.
    """

    def __init__(self, edges: Sequence[float], guesses: Sequence[float]) -> None:
        """`edges` separate the bins; `guesses` [len(edges) + 1] are the rates before anything is seen."""
        if len(guesses) != len(edges) + 1:
            raise ValueError("one guess for each bin")
        self._edges = list(edges)
        self._guesses = list(guesses)
        self.rates = [DecayedMean(guess) for guess in guesses]

    def fork(self) -> AcceptanceModel:
        """See DecayedMean.begun."""
        here = AcceptanceModel(self._edges, self._guesses)
        here.rates = [rate.fork() for rate in self.rates]
        return here

    def merge(self, text: AcceptanceModel) -> None:
        """See DecayedMean.learn."""
        for rate, seen in zip(self.rates, text.rates, strict=True):
            rate.merge(seen)

    def observe(self, number: float, right: bool) -> None:
        self.rates[bisect_right(self._edges, number)].observe(float(right))

    def rate(self, number: float) -> float:
        return self.rates[bisect_right(self._edges, number)].value


def of_probability() -> AcceptanceModel:
    """For a drafter that gives each token a probability."""
    edges = [0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97]
    return AcceptanceModel(edges, [0.01, 0.03, 0.07, 0.14, 0.27, 0.42, 0.57, 0.72, 0.85, 0.93, 0.98])


def of_match_length() -> AcceptanceModel:
    """For lookups, by the number of matching tokens before the looked-up one."""
    return AcceptanceModel([2, 3, 4, 5, 7, 11, 17, 32], [0.1, 0.4, 0.5, 0.6, 0.65, 0.75, 0.85, 0.9, 0.95])
