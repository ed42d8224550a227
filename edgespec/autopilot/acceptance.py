"""Acceptance rates of drafted tokens, learned in bins of one feature of the token."""

from __future__ import annotations

from bisect import bisect_right

from edgespec.autopilot.decayed_mean import DecayedMean
from edgespec.core.drafter import Confidence

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
