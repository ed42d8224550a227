"""The cost model: seconds of a target forward by its number of rows, from a profile and recent measurements."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

_WINDOW = 15  # latest measurements of a number of rows; with fewer, the expected value is one of them
_MAX_AGE = 256  # rounds; the machine may have changed since an older measurement
_MAX_OUTLIER = 2.0  # limit of a single measurement, as a multiple of the expected value: the machine may be busy
_REFRESH_ROUNDS = 16  # between two checks of age and distance
_MAX_LENGTH = 8  # drafted tokens of a predicted chain
_MIN_NEAR = 1024  # tokens of context within which plain steps are compared; at longer contexts half the position


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds measured on load. Raises ValueError without a time for one row, or for times that are not above zero.

    rows     of a target forward by its number of rows
    draft_s  of a token that the draft model drafts; None without a draft model
    read_s   of a token of the text that the draft model reads
    """

    rows: Mapping[int, float]
    draft_s: float | None = None
    read_s: float = 0.0

    def __post_init__(self) -> None:
        times = [*self.rows.values(), 1.0 if self.draft_s is None else self.draft_s]
        if 1 not in self.rows or not all(0 < t < math.inf for t in times) or not 0 <= self.read_s < math.inf:
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
    """Seconds of a target forward by its number of rows, and of a drafted token.

    The curve may have any shape: four rows can be cheaper than three. One row is measured in seconds, near the present
    position. More rows are measured as multiples of it, which stay valid when the machine slows down or the context
    grows. Each estimate is a median, so that one slow round decides nothing.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._interpolated: dict[int, float] = {}  # rows -> plain steps, by the profile
        self._plain: deque[tuple[int, int, float]] = deque(maxlen=_WINDOW)  # (round, position, seconds)
        self._multiples: dict[int, deque[tuple[int, float]]] = {}  # rows -> (round, plain steps)
        self._drafted: deque[float] = deque(maxlen=_WINDOW)  # seconds
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

    def observe_drafted(self, seconds: float) -> None:
        """A token of the draft model took `seconds`."""
        self._drafted.append(seconds)

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

    @property
    def draft_s(self) -> float:
        """Seconds of a drafted token. The profile must have been measured with a draft model."""
        expected = self.profile.draft_s
        assert expected is not None
        return median([expected, *self._drafted]) if len(self._drafted) < _WINDOW else median(self._drafted)

    @property
    def read_s(self) -> float:
        """Seconds of a token of the text that the draft model reads."""
        return self.profile.read_s * self.draft_s / (self.profile.draft_s or 1.0)

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
