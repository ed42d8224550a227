"""The cost model: seconds of forwards by their rows, and of drafting, from a profile and recent measurements."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

import numpy as np

_WINDOW = 15  # latest measurements of a number of rows; with fewer, the expected value is one of them
_MAX_AGE = 256  # rounds; the machine may have changed since an older measurement
_MAX_OUTLIER = 2.0  # limit of a single measurement, as a multiple of the expected value: the machine may be busy
_REFRESH_ROUNDS = 16  # between two checks of age and distance
_MAX_LENGTH = 8  # drafted tokens of a predicted chain
_MIN_NEAR = 1024  # tokens of context within which plain steps are compared; at longer contexts half the position


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
        """Of a unit that proposes `n` tokens on a path: linear between the measured ones."""
        if n in self.units:
            return self.units[n]
        known = sorted(self.units)
        return float(np.interp(n, known, [self.units[each] for each in known]))

    def path_s(self, n: int) -> float:
        """Of `n` tokens on a path: one block, or `n` units of one token."""
        return self.seconds(n) if len(self.units) > 1 else n * self.seconds(1)


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds measured on load. Raises ValueError without a time for one row, or for times that are not above zero.

    rows    of a target forward by its number of rows
    drafts  of the drafters that take time, by name
    """

    rows: Mapping[int, float]
    drafts: Mapping[str, DraftCost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if 1 not in self.rows or not all(0 < t < math.inf for t in self.rows.values()):
            raise ValueError("a profile needs one row, and times above zero")


def choose_chain_length(rows: Mapping[int, float], draft_s: float, acceptance: float) -> tuple[int, float]:
    """(length, speedup over plain decoding) of the fastest chain whose tokens are each accepted at rate `acceptance`.

    `rows` as in a Profile; a length whose rows were not measured is left out. (0, 1.0) if no chain is faster.
    """
    best, expected, reached = (0, 1.0), 1.0, 1.0
    for depth in range(1, _MAX_LENGTH + 1):
        reached *= acceptance
        expected += reached
        if depth + 1 in rows:
            speedup = expected * rows[1] / (rows[depth + 1] + depth * draft_s)
            best = max(best, (depth, speedup), key=lambda each: each[1])
    return best


class CostModel:
    """Seconds of a target forward by its number of rows, and of drafting.

    The curve may have any shape: four rows can be cheaper than three. One row is measured in seconds, near the present
    position. More rows are measured as multiples of it, which stay valid when the machine slows down or the context
    grows. Each estimate is a median, so that one slow round decides nothing.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._interpolated: dict[int, float] = {}  # rows -> plain steps, by the profile
        self._plain: deque[tuple[int, int, float]] = deque(maxlen=_WINDOW)  # (round, position, seconds)
        self._multiples: dict[int, deque[tuple[int, float]]] = {}  # rows -> (round, plain steps)
        self._units: dict[str, deque[float]] = {}  # drafter -> multiples of the profile's seconds
        self._drafting_drift: dict[str, float] = {}  # their medians
        self._round = 0
        self._position = 0
        self._plain_s = profile.rows[1]
        self._medians: dict[int, float] = {}  # rows -> plain steps
        self._drift = 1.0  # measured multiples over the profile's

    def observe(self, rows: int, position: int, seconds: float) -> None:
        """A forward of `rows` rows, its root at `position`, took `seconds`, sampling and commit included."""
        self._round += 1
        self._position = position
        if rows == 1:
            self._plain.append((self._round, position, seconds))
            self._update_plain()
        else:
            self._multiples.setdefault(rows, deque(maxlen=_WINDOW)).append((self._round, seconds / self._plain_s))
            self._update_rows(rows)
        if self._round % _REFRESH_ROUNDS == 0:
            self._discard_stale()

    def observe_drafting(self, drafter: str, seconds: float, expected_s: float) -> None:
        """Units of `drafter` took `seconds`; `expected_s` by the profile."""
        measured = self._units.setdefault(drafter, deque(maxlen=_WINDOW))
        measured.append(seconds / expected_s)
        self._drafting_drift[drafter] = median(measured if len(measured) == _WINDOW else [1.0, *measured])

    def begin(self, position: int) -> None:
        """A generation begins at `position`."""
        self._position = position
        self._discard_stale()

    def seconds(self, rows: int) -> float:
        """Expected seconds of a forward of `rows` rows. Rows not measured lately follow the profile and its drift."""
        if rows == 1:
            return self._plain_s
        measured = self._medians.get(rows)
        return (self._interpolate(rows) * self._drift if measured is None else measured) * self._plain_s

    def add_drafters(self, drafts: Mapping[str, DraftCost]) -> None:
        """Add the costs of more drafters to the profile."""
        self.profile = Profile(self.profile.rows, {**self.profile.drafts, **drafts})

    def has_cost(self, drafter: str) -> bool:
        """Whether the time of `drafter` is known."""
        return drafter in self.profile.drafts

    def unit_s(self, drafter: str, n: int = 1) -> float:
        """Seconds of a unit of `drafter` that proposes `n` tokens on a path; see `has_cost`."""
        return self.profile.drafts[drafter].seconds(n) * self._drafting_drift.get(drafter, 1.0)

    def read_s(self, drafter: str) -> float:
        """Seconds of a token of the text that `drafter` reads; see `has_cost`."""
        return self.profile.drafts[drafter].read_s * self._drafting_drift.get(drafter, 1.0)

    def count_recent(self, rows: int) -> int:
        """The number of recent measurements of `rows` rows."""
        return len(self._recent_plain()) if rows == 1 else len(self._recent_multiples(rows))

    def _discard_stale(self) -> None:
        """Recompute all estimates without measurements that are too old or too far from the position."""
        self._update_plain()
        self._medians = {}
        for rows in self._multiples:
            self._update_rows(rows)

    def _recent_plain(self) -> list[float]:
        near = max(_MIN_NEAR, self._position // 2)
        oldest = self._round - _MAX_AGE
        return [s for at, position, s in self._plain if at > oldest and abs(position - self._position) <= near]

    def _recent_multiples(self, rows: int) -> list[float]:
        oldest = self._round - _MAX_AGE
        return [multiple for at, multiple in self._multiples.get(rows, ()) if at > oldest]

    def _update_plain(self) -> None:
        recent = self._recent_plain()
        self._plain_s = median(recent if len(recent) == _WINDOW else [self.profile.rows[1], *recent])

    def _update_rows(self, rows: int) -> None:
        recent = self._recent_multiples(rows)
        if recent:
            self._medians.pop(rows, None)  # the other rows give the expected value of this one
            expected = self._interpolate(rows) * self._measure_drift()
            if len(recent) == 1:
                recent = [min(recent[0], _MAX_OUTLIER * expected)]
            self._medians[rows] = median(recent if len(recent) == _WINDOW else [expected, *recent])
        self._drift = self._measure_drift()

    def _measure_drift(self) -> float:
        return median([1.0, *(steps / self._interpolate(rows) for rows, steps in self._medians.items())])

    def _interpolate(self, rows: int) -> float:
        """The profile in plain steps: linear between its points, and beyond the last one."""
        found = self._interpolated.get(rows)
        if found is None:
            curve = self.profile.rows
            known = sorted(curve)
            if rows in curve or len(known) == 1:
                found = curve.get(rows, curve[known[0]] * rows)
            else:
                above = next((i for i, each in enumerate(known) if each > rows), len(known) - 1)
                left, right = known[above - 1], known[above]
                slope = (curve[right] - curve[left]) / (right - left)
                found = max(curve[left] + slope * (rows - left), curve[1] * 0.5)
            found = self._interpolated[rows] = found / curve[1]
        return found
