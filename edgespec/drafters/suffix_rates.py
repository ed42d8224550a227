"""How often a token that followed a match in earlier texts is right: a logistic model of bands, learned online."""

from __future__ import annotations

import json
from bisect import bisect_right
from math import exp, isfinite

_LENGTHS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 128, 256, 1024)  # where a band begins; below 2 is one too
_SHARES = (0.25, 0.5, 0.75)
_KINDS = ("answer", "prompt", "corpus")
# Fitted to versions of source files, each compared with the earlier ones of all files. In chats, tokens on which all
# places agree after a short match are right in 5 to 25% of cases, so the first weights of these are lower than fitted.
_BY_LENGTH = (-1.7, -1.5, -1.3, -1.1, -0.8, -0.4, 0.1, 0.4, 0.7, 1.1, 1.6, 1.8, 2.0, 2.3, 2.5, 2.8, 2.8)
_BY_AGREEMENT = (0.8, 0.6, 0.8, -1.9, -1.9, -0.8, -0.5, -0.3, -0.1, 0.8, 1.0)  # one, 2 or 3, or more that agree; shares
_BY_KIND = (0.0,) * (2 * len(_KINDS))
_GUESSES = (*_BY_LENGTH, *_BY_AGREEMENT, *_BY_KIND)
_FIRST_KIND = len(_BY_LENGTH) + len(_BY_AGREEMENT)
_FIRST_STEP, _LAST_STEP = 0.25, 0.005  # by which a weight follows an error, at first and after many
_SLOWING = 0.005  # part of its distance to `_LAST_STEP` by which a step shrinks at each observation
_MAX_WEIGHT = 20.0  # stored weights beyond it, up or down, are refused
Features = tuple[int, int, int]
"""Indices of the three weights of a token: for the match's length, the share of places that agree, and their kind."""


class SuffixRates:
    """The probability of a token is a logistic function of three weights, which move by less and less."""

    def __init__(self) -> None:
        self._weights = [*_GUESSES]
        self._steps = [_FIRST_STEP] * len(_GUESSES)

    @staticmethod
    def load(data: bytes | None) -> SuffixRates:
        """Restore what `dump` has returned; the first guesses for None, and for what it cannot have returned."""
        rates = SuffixRates()
        try:
            state = json.loads(data or b"{}")
            weights, steps = [[float(each) for each in state[name]] for name in ("weights", "steps")]
        except (ValueError, KeyError, TypeError, RecursionError):
            return rates
        is_whole = len(weights) == len(steps) == len(_GUESSES) and all(map(isfinite, (*weights, *steps)))
        if is_whole and max(map(abs, weights)) <= _MAX_WEIGHT and all(0 < step <= _FIRST_STEP for step in steps):
            rates._weights, rates._steps = weights, steps
        return rates

    def dump(self) -> bytes:
        """Bytes for `load`."""
        return json.dumps({"weights": self._weights, "steps": self._steps}).encode()

    def rate(self, features: Features) -> float:
        """The probability that a token of these features is right."""
        weights = self._weights
        length, agreement, kind = features
        return 1.0 / (1.0 + exp(-(weights[length] + weights[agreement] + weights[kind])))

    def rate_all(self, features: Features, length: int, n: int) -> list[float]:
        """[n] the rates of tokens with these features after `length` matching tokens, `length` + 1, and so on."""
        found: list[float] = []
        while len(found) < n:
            band = bisect_right(_LENGTHS, length + len(found))
            end = _LENGTHS[band] - length if band < len(_LENGTHS) else n
            found += [self.rate((band, *features[1:]))] * (min(end, n) - len(found))
        return found

    def learn(self, features: Features, rate: float, is_right: bool) -> None:
        """A token of these features, which were given `rate`, was right or wrong."""
        error = is_right - rate
        for at in features:
            step = self._steps[at]
            self._weights[at] += step * error
            self._steps[at] = step + _SLOWING * (_LAST_STEP - step)


def describe(length: int, n_agreeing: int, n: int, kind: str, *, is_live: bool, is_latest: bool = True) -> Features:
    """The features of a token that `n_agreeing` of `n` places have after a match of `length` tokens.

    `kind` and `is_live` are of the latest of them; `is_latest`: whether that is the latest of all.
    """
    if n_agreeing == n:
        agreement = 0 if n == 1 else 1 if n < 4 else 2
    else:
        agreement = 3 + 2 * bisect_right(_SHARES, n_agreeing / n) + is_latest
    kind_at = _FIRST_KIND + 2 * _KINDS.index(kind) + is_live
    return bisect_right(_LENGTHS, length), len(_BY_LENGTH) + agreement, kind_at
