"""The cost model: seconds of forwards by rows and context, and of drafting, from a profile and recent measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from edgespec.autopilot.band_medians import BandMedians
from edgespec.autopilot.profile import ContextCurve, DraftCost, Profile, interpolate

_REFRESH_ROUNDS = 16  # between two checks of age
_REFRESH_TOKENS = 64  # of context, within which the profile's seconds are taken as equal


class CostModel:
    """Seconds of a target forward by its number of rows, and of drafting, near the present position.

    The profile says what each takes there, and measurements correct it, apart for each band of positions: one row in
    seconds, more rows as multiples of it, since those stay valid when the machine slows down. Each correction is the
    median of recent measurements. A band without any takes the correction of the nearest band that has some.

    revision  grows where the time of some rows may have changed as a multiple of one row's
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.revision = 0
        self._position = 0  # for which seconds were looked up in the profile
        self._curves: dict[int, ContextCurve] = {}  # rows -> what the profile says, computed once
        self._rows_s: dict[int, float] = {}  # by the profile, near the position
        self._units_s: dict[tuple[str, int], float] = {}
        self._measured = BandMedians()  # measured seconds over the profile's; keyed by rows, or by drafter
        self._plain = 1.0  # the correction of one row
        self._multiples: dict[int, float] = {}  # rows -> the correction of its plain steps
        self._drift = 1.0  # the same for all numbers of rows without recent measurements
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
        self.revision += 1

    def _refresh(self) -> None:
        """Recompute all corrections without measurements that are too old."""
        self._multiples, self._drafting = {}, {}
        self.revision += 1
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
            self.revision += 1

    def _measure_drift(self) -> float:
        return median([1.0, *self._multiples.values()])
