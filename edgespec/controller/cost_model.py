"""The cost model: seconds of forwards by rows and context, and of drafting, from a profile and recent measurements."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from edgespec.core.protocols import SOLO, BatchPeers

# Medians of recent measurements, apart for each band of positions.


_WINDOW = 15  # latest measurements of one kind; with fewer, the expected value is one of them
_MAX_AGE = 256  # rounds; the machine may have changed since an older measurement
_MAX_OUTLIER = 2.0  # limit of a single measurement, as a multiple of the expected value: the machine may be busy
_FIRST_BAND = 1024  # tokens of context in the first band of positions; each further band ends at twice the last one's

Measured = deque[tuple[int, float]]  # (round, value)


class BandMedians:
    """Medians of several kinds of measurements, each named by a key.

    round  the number of rounds so far, by which measurements grow older
    """

    def __init__(self) -> None:
        self.round = 0
        self._band = 0  # the present one
        self._measured: dict[tuple[int | str, int], Measured] = {}  # by key and band

    def move_to(self, position: int) -> bool:
        """The next measurements are at `position`; returns whether that is in another band."""
        before, self._band = self._band, (position // _FIRST_BAND).bit_length()
        return self._band != before

    def add(self, key: int | str, value: float) -> None:
        self._measured.setdefault((key, self._band), deque(maxlen=_WINDOW)).append((self.round, value))

    @property
    def keys(self) -> list[int | str]:
        """What was ever measured."""
        return list(dict.fromkeys(key for key, _ in self._measured))

    def count(self, key: int | str) -> int:
        """The number of recent measurements in the present band and the two beside it."""
        return sum(len(self._recent(key, self._band + step)) for step in (-1, 0, 1))

    def estimate(self, key: int | str, expected: float) -> float | None:
        """The median of the present band, given that of the nearest other band with recent measurements.

        `expected` is the value where nothing is measured. None if nothing is.
        """
        bands = sorted((band for each, band in self._measured if each == key), key=lambda band: abs(band - self._band))
        recent = [values for band in bands if (values := self._recent(key, band))][:2]
        for values in reversed(recent):
            if len(values) == 1:
                values = [min(values[0], _MAX_OUTLIER * expected)]
            # The expected value is one of few measurements, so that one slow round decides nothing.
            expected = median(values if len(values) == _WINDOW else [expected, *values])
        return expected if recent else None

    def _recent(self, key: int | str, band: int) -> list[float]:
        oldest = self.round - _MAX_AGE
        return [value for at, value in self._measured.get((key, band), ()) if at > oldest]


_REFRESH_ROUNDS = 16  # between two checks of age
_REFRESH_TOKENS = 64  # of context, within which the profile's seconds are taken as equal
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
    """Seconds after `context` tokens: linear, and beyond the last context what exceeds the first in proportion."""
    if len(curve) == 1 or context <= 0:
        return curve[0]
    left = 0
    for right in curve:
        if context < right:
            return curve[left] + (curve[right] - curve[left]) * (context - left) / (right - left)
        left = right
    return curve[0] + (curve[left] - curve[0]) * context / left


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


class CostModel:
    """Seconds of a target forward by its number of rows, and of drafting, near the present position.

    The profile says what each takes there, and measurements correct it, apart for each band of positions: one row in
    seconds, more rows as multiples of it, since those stay valid when the machine slows down. Each correction is the
    median of recent measurements. In a band without any it is that of the nearest band that has some.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._position = 0  # for which seconds were looked up in the profile
        self._curves: dict[int, ContextCurve] = {}  # rows -> what the profile says, computed once
        self._rows_s: dict[int, float] = {}  # by the profile, near the position
        self._units_s: dict[tuple[str, int], float] = {}
        self._measured = BandMedians()  # over what the profile says; by rows, and by drafter
        self._plain = 1.0  # the correction of one row
        self._multiples: dict[int, float] = {}  # rows -> the correction of its plain steps
        self._drift = 1.0  # that of rows without recent measurements
        self._drafting: dict[str, float] = {}  # drafter -> the correction of its units

    def observe(self, rows: int, position: int, seconds: float) -> None:
        """A forward of `rows` rows, its root at `position`, took `seconds`, sampling and commit included."""
        self.move_to(position)
        self._measured.round += 1
        plain = self._plain if rows > 1 else 1.0
        self._measured.add(rows, seconds / (self._predict_s(rows) * plain))
        self._correct(rows)
        if self._measured.round % _REFRESH_ROUNDS == 0:
            self._refresh()

    def observe_drafting(self, drafter: str, seconds: float, expected_s: float) -> None:
        """Units of `drafter` took `seconds`; `expected_s` by the profile, see `predict_unit_s`."""
        self._measured.add(drafter, seconds / expected_s)
        self._correct(drafter)

    def move_to(self, position: int) -> None:
        """The next forwards are at `position`."""
        if abs(position - self._position) > _REFRESH_TOKENS:
            self._position = position
            self._forget_predictions()
        if self._measured.move_to(position):
            self._refresh()

    def seconds(self, rows: int) -> float:
        plain = self._predict_s(rows) * self._plain
        return plain if rows == 1 else plain * self._multiples.get(rows, self._drift)

    def add_drafters(self, drafts: Mapping[str, DraftCost]) -> None:
        self.profile = replace(self.profile, drafts={**self.profile.drafts, **drafts})
        self._forget_predictions()

    def has_cost(self, drafter: str) -> bool:
        """Whether the time of `drafter` is known."""
        return drafter in self.profile.drafts

    def unit_s(self, drafter: str, n: int = 1) -> float:
        """Seconds of a unit of `drafter` that proposes `n` tokens on a path; see `has_cost`."""
        return self.predict_unit_s(drafter, n) * self._drafting.get(drafter, 1.0)

    def predict_unit_s(self, drafter: str, n: int = 1) -> float:
        """`unit_s` by the profile alone."""
        if (found := self._units_s.get((drafter, n))) is None:
            found = self._units_s[drafter, n] = self.profile.unit_s(drafter, n, self._position)
        return found

    def read_s(self, drafter: str) -> float:
        """Seconds of a token of the text that `drafter` reads; see `has_cost`."""
        return self.profile.drafts[drafter].read_s * self._drafting.get(drafter, 1.0)

    def count_recent(self, rows: int) -> int:
        """The number of recent measurements of `rows` rows in the present band of positions and those beside it."""
        return self._measured.count(rows)

    def _predict_s(self, rows: int) -> float:
        if (found := self._rows_s.get(rows)) is None:
            if (curve := self._curves.get(rows)) is None:
                curve = self._curves[rows] = self.profile.curve(rows)
            found = self._rows_s[rows] = interpolate(curve, self._position)
        return found

    def _forget_predictions(self) -> None:
        self._rows_s, self._units_s = {}, {}

    def _refresh(self) -> None:
        """Recompute all corrections without measurements that are too old."""
        self._multiples, self._drafting = {}, {}
        for key in self._measured.keys:
            self._correct(key)

    def _correct(self, key: int | str) -> None:
        """Recompute the correction of a number of rows, or of a drafter's units."""
        estimate = self._measured.estimate
        if isinstance(key, str):
            self._drafting[key] = estimate(key, 1.0) or 1.0
        elif key == 1:
            self._plain = estimate(key, 1.0) or 1.0
        else:
            self._multiples.pop(key, None)  # the other rows give the expected value of this one
            if (correction := estimate(key, self._measure_drift())) is not None:
                self._multiples[key] = correction
            self._drift = self._measure_drift()

    def _measure_drift(self) -> float:
        return median([1.0, *self._multiples.values()])


# The cost of a draft's rows to one of several generations that share their forwards.


_CHEAP_ROW = 0.15  # of a plain step, that a further row takes where drafters may fill rows
_FILLED_ROWS = range(4, 9)  # of a forward with such a draft
_LONG_STEP_S = 0.05  # of a plain step, of which the time of such drafters is next to nothing
_MIN_SHARE = 0.25  # of the equal part: rows that fill a tile can make a forward faster, but no generation's are free


class MarginalCost:
    """The part of a forward's seconds that is charged to one generation.

    If all generations decoded plainly, each would be charged an equal part. Rows that a draft adds are charged to it in
    full. A draft that pays by this measure therefore makes all generations together faster. Without peers the charge is
    the whole forward.
    """

    def __init__(self, model: CostModel, query_peers: Callable[[], BatchPeers] = lambda: SOLO) -> None:
        """`query_peers` returns the peers of the next forward."""
        self.model = model
        self.position = 0  # of the next forward's root
        self.peers = SOLO  # of that forward
        self._query_peers = query_peers

    def begin_round(self, position: int) -> None:
        """The next forward's root is at `position`; queries its peers."""
        self.position = position
        self.model.move_to(position)
        self.peers = self._query_peers()

    @property
    def has_cheap_rows(self) -> bool:
        """Whether a forward of some rows takes little longer than a plain step, which is not short."""
        plain_s = self.model.seconds(1)
        row_s = min((self.model.seconds(rows) - plain_s) / (rows - 1) for rows in _FILLED_ROWS)
        return plain_s >= _LONG_STEP_S and row_s <= _CHEAP_ROW * plain_s

    def seconds(self, rows: int) -> float:
        """Seconds charged for `rows` rows, the root included."""
        seconds, peers = self.model.seconds, self.peers
        if not peers.sessions:
            return seconds(rows)
        equal_part = seconds(peers.sessions + 1) / (peers.sessions + 1)
        added = seconds(peers.rows + rows) - seconds(peers.rows + 1)
        return max(equal_part + added, equal_part * _MIN_SHARE)
