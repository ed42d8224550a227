"""What a round costs: live medians over a profile, as a curve over the rows of a target forward."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

_WINDOW = 15  # measurements of a number of rows that count
_MEMORY = 256  # rounds after which a measurement no longer does: the machine may have changed
_CREDIBLE = 2.0  # times what is expected of it, that a single measurement may be: it may be of a busy moment
_REFRESHED = 16  # rounds after which age and distance are looked at again
_LONGEST = 8  # drafted tokens of a chain that is foretold
_NEAR = 1024  # tokens of context within which it does; at longer contexts half the position


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds measured on load.

    rows     of a target forward by its number of rows; knows one row
    draft_s  for each token that the draft model drafts; None without one
    read_s   for each token of the text that it reads
    """

    rows: Mapping[int, float]
    draft_s: float | None = None
    read_s: float = 0.0

    def __post_init__(self) -> None:
        times = [*self.rows.values(), 1.0 if self.draft_s is None else self.draft_s]
        if 1 not in self.rows or not all(0 < t < math.inf for t in times) or not 0 <= self.read_s < math.inf:
            raise ValueError("a profile needs one row, and times above zero")


def best_chain(rows: Mapping[int, float], draft_s: float, acceptance: float) -> tuple[int, float]:
    """(length, times plain decoding) of the fastest chain if each drafted token is right with `acceptance`; a length
    of 0 where none is faster. `rows` as in a Profile, of which lengths without a measurement are left out.
    """
    best, expected, reached = (0, 1.0), 1.0, 1.0
    for depth in range(1, _LONGEST + 1):
        reached *= acceptance
        expected += reached
        if depth + 1 in rows:
            best = max(
                best, (depth, expected * rows[1] / (rows[depth + 1] + depth * draft_s)), key=lambda each: each[1]
            )
    return best


class CostModel:
    """Seconds of a target forward by its number of rows, and of a drafted token.

    Nothing is assumed of the curve's shape: four rows may be cheaper than three. One row is measured in seconds, near
    the present position; more rows as multiples of what one row took at the time, since machines slow down and contexts
    grow. A few measurements are weighed against what is expected, so that one slow round decides nothing.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._known = sorted(profile.rows)
        self._interpolated: dict[int, float] = {}
        self._plain: deque[tuple[int, int, float]] = deque(maxlen=_WINDOW)  # (round, position, seconds)
        self._multiples: dict[int, deque[tuple[int, float]]] = {}  # rows -> (round, plain steps)
        self._drafted: deque[float] = deque(maxlen=_WINDOW)
        self._round = 0
        self._position = 0
        self._plain_s = profile.rows[1]
        self._medians: dict[int, float] = {}  # in plain steps
        self._off = 1.0

    def observe(self, rows: int, position: int, seconds: float) -> None:
        """A forward of `rows` rows whose root stood at `position` took so long, sampling and commit included."""
        self._round += 1
        self._position = position
        if rows == 1:
            self._plain.append((self._round, position, seconds))
            self._weigh_plain()
        else:
            self._multiples.setdefault(rows, deque(maxlen=_WINDOW)).append((self._round, seconds / self._plain_s))
            self._weigh(rows)
        if self._round % _REFRESHED == 0:
            self._refresh()

    def observe_drafted(self, seconds: float) -> None:
        """A token of the draft model took so long."""
        self._drafted.append(seconds)

    def begin(self, position: int) -> None:
        """A text goes on at `position`."""
        self._position = position
        self._refresh()

    def seconds(self, rows: int) -> float:
        if rows == 1:
            return self._plain_s
        found = self._medians.get(rows)
        return (self._profiled(rows) * self._off if found is None else found) * self._plain_s

    @property
    def draft_s(self) -> float:
        """Of a drafted token; needs a draft model's profile."""
        expected = self.profile.draft_s
        assert expected is not None
        return median([expected, *self._drafted]) if len(self._drafted) < _WINDOW else median(self._drafted)

    @property
    def read_s(self) -> float:
        """Of a token of the text that the draft model reads."""
        return self.profile.read_s * self.draft_s / (self.profile.draft_s or 1.0)

    def measured(self, rows: int) -> int:
        """How many measurements of so many rows still count."""
        return len(self._recent_plain()) if rows == 1 else len(self._recent(rows))

    def _refresh(self) -> None:
        """Forget what is too old or too far away."""
        self._weigh_plain()
        self._medians = {}
        for rows in self._multiples:
            self._weigh(rows)

    def _recent_plain(self) -> list[float]:
        near = max(_NEAR, self._position // 2)
        oldest = self._round - _MEMORY
        return [s for at, position, s in self._plain if at > oldest and abs(position - self._position) <= near]

    def _recent(self, rows: int) -> list[float]:
        """Multiples of one row that so many took."""
        oldest = self._round - _MEMORY
        return [multiple for at, multiple in self._multiples.get(rows, ()) if at > oldest]

    def _weigh_plain(self) -> None:
        recent = self._recent_plain()
        self._plain_s = median(recent if len(recent) == _WINDOW else [self.profile.rows[1], *recent])

    def _weigh(self, rows: int) -> None:
        recent = self._recent(rows)
        if recent:
            self._medians.pop(rows, None)  # others tell what is expected of this one
            expected = self._profiled(rows) * self._far_off()
            if len(recent) == 1:
                recent = [min(recent[0], _CREDIBLE * expected)]
            self._medians[rows] = median(recent if len(recent) == _WINDOW else [expected, *recent])
        self._off = self._far_off()

    def _far_off(self) -> float:
        """Measured multiples over those of the profile."""
        return median([1.0, *(found / self._profiled(rows) for rows, found in self._medians.items())])

    def _profiled(self, rows: int) -> float:
        """The profile in plain steps, with straight lines between its points and on beyond the last."""
        found = self._interpolated.get(rows)
        if found is None:
            known, curve = self._known, self.profile.rows
            if rows in curve or len(known) == 1:
                found = curve.get(rows, curve[known[0]] * rows)
            else:
                above = next((i for i, each in enumerate(known) if each > rows), len(known) - 1)
                left, right = known[above - 1], known[above]
                slope = (curve[right] - curve[left]) / (right - left)
                found = max(curve[left] + slope * (rows - left), curve[1] * 0.5)
            found = self._interpolated[rows] = found / curve[1]
        return found
