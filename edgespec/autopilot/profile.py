"""The measured costs of a model's forwards and of its drafters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

_MAX_LENGTH = 8  # drafted tokens of a predicted chain
ContextCurve = dict[int, float]
"""Seconds by tokens of context, ascending from 0."""


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of a drafter. Raises ValueError for times that are not above zero.

    units   of a unit of its work, by the tokens on a path that the unit proposes
    read_s  of a token of the text that it reads
    """

    units: Mapping[int, float]
    read_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.units or not all(n > 0 and 0 < s < math.inf for n, s in self.units.items()):
            raise ValueError("a drafter needs the time of a unit, above zero")
        if not 0 <= self.read_s < math.inf:
            raise ValueError("reading takes no negative time")

    def seconds(self, n: int) -> float:
        """Seconds of a unit that proposes `n` tokens on a path: linear between the measured ones."""
        known = sorted(self.units)
        return float(np.interp(n, known, [self.units[each] for each in known]))

    def path_s(self, n: int) -> float:
        """Seconds of `n` tokens on a path: one block, or `n` units of one token."""
        return self.seconds(n) if len(self.units) > 1 else n * self.seconds(1)


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured seconds. Raises ValueError without a time for one row, or for times that are not above zero.

    rows    of a target forward by its number of rows, after a few tokens
    drafts  of the drafters that take time, by name, after a few tokens
    longer  the same after more tokens, by their number; each may have fewer rows and drafters

    A forward takes the time of its weights, which is the one after a few tokens, and the time of its attention, which
    is what the forwards after more tokens take beyond it. The attention's time is linear between the measured numbers
    of rows and of tokens, and proportional beyond the last; n rows take at least that of one, and at most n times it.
    Without `longer` it is zero.
    """

    rows: Mapping[int, float]
    drafts: Mapping[str, DraftCost] = field(default_factory=dict)
    longer: Mapping[int, Profile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if 1 not in self.rows or not all(n > 0 and 0 < t < math.inf for n, t in self.rows.items()):
            raise ValueError("a profile needs one row, and times above zero")
        if not all(n > 0 and not each.longer for n, each in self.longer.items()):
            raise ValueError("the profile of a longer context needs tokens, and has no longer ones itself")

    def seconds(self, rows: int, context: int = 0) -> float:
        """Seconds of a target forward of `rows` rows after `context` tokens."""
        return interpolate(self.curve(rows), context)

    def curve(self, rows: int) -> ContextCurve:
        """Seconds of a target forward of `rows` rows."""
        curve = {0: self._weights_s(rows)}
        for n in sorted(self.longer):
            measured = self.longer[n].rows
            one = max(0.0, measured[1] - self._weights_s(1))
            added = {m: min(max(measured[m] - self._weights_s(m), one), m * one) for m in sorted(measured)}
            attention_s = float(np.interp(rows, list(added), list(added.values())))
            curve[n] = curve[0] + attention_s * max(1.0, rows / max(added))
        return curve

    def unit_s(self, drafter: str, n: int, context: int) -> float:
        """Seconds of a unit of `drafter` that proposes `n` tokens on a path. Raises KeyError if it was not measured."""
        seconds = self.drafts[drafter].seconds(n)
        longer = {c: self.longer[c].drafts[drafter] for c in sorted(self.longer) if drafter in self.longer[c].drafts}
        return interpolate({0: seconds} | {c: max(seconds, cost.seconds(n)) for c, cost in longer.items()}, context)

    def _weights_s(self, rows: int) -> float:
        """Interpolates between the measured numbers of rows; beyond, extends the line from the first to the last."""
        curve = self.rows
        known = sorted(curve)
        if rows in curve or len(known) == 1:
            return curve.get(rows, curve[1] * rows)
        above = next((i for i, each in enumerate(known) if each > rows), 0)
        left, right = (known[above - 1], known[above]) if above else (known[0], known[-1])
        slope = (curve[right] - curve[left]) / (right - left)
        return max(curve[left] + slope * (rows - left), curve[1] * 0.5)


def interpolate(curve: ContextCurve, context: int) -> float:
    """Seconds after `context` tokens: linear between the contexts of `curve`.

    Beyond the last of them, what exceeds the seconds at 0 grows in proportion to the context.
    """
    if len(curve) == 1 or context <= 0:
        return curve[0]
    left = 0
    for right in curve:
        if context < right:
            return curve[left] + (curve[right] - curve[left]) * (context - left) / (right - left)
        left = right
    return curve[0] + (curve[left] - curve[0]) * context / left


def find_paying_acceptance(profile: Profile, drafter: str) -> float | None:
    """The lowest acceptance, in steps of 5%, at which a chain of `drafter` beats plain decoding; None if none does."""
    draft_s = profile.drafts[drafter].path_s(1) if drafter in profile.drafts else 0.0
    return find_lowest(lambda rate: choose_chain_length(profile.rows, draft_s, rate)[0] > 0)


def find_lowest(pays: Callable[[float], bool]) -> float | None:
    """The lowest acceptance, in steps of 5%, that `pays`; None if none does."""
    return next((percent / 100 for percent in range(5, 101, 5) if pays(percent / 100)), None)


def choose_chain_length(
    rows: Mapping[int, float], draft_s: float, acceptance: float, max_length: int = _MAX_LENGTH
) -> tuple[int, float]:
    """(length, speedup over plain decoding) of the fastest chain whose tokens are each accepted at rate `acceptance`.

    `rows` as in a Profile; a length whose rows were not measured is left out. (0, 1.0) if no chain is faster.
    """
    best, expected, reached = (0, 1.0), 1.0, 1.0
    for depth in range(1, max_length + 1):
        reached *= acceptance
        expected += reached
        if depth + 1 in rows:
            speedup = expected * rows[1] / (rows[depth + 1] + depth * draft_s)
            best = max(best, (depth, speedup), key=lambda each: each[1])
    return best
