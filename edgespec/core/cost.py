"""What a round costs: live medians over a profile, as a curve over the rows of a target forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

_WINDOW = 15  # measurements of a number of rows that count
_MEMORY = 256  # rounds after which a measurement no longer does: the context has grown, the machine changed


class CostCurve:
    """Seconds of a target forward by its number of rows.

    Nothing is assumed of the shape: four rows may be cheaper than three. A few measurements are weighed against what
    the profile expects, scaled by what one row costs now against what it did, so that one slow round decides nothing.
    """

    def __init__(self, profile: Mapping[int, float]) -> None:
        """`profile`: seconds by rows, measured on this session; has to know one row."""
        if 1 not in profile or min(profile.values()) <= 0:
            raise ValueError("a profile needs one row, and times above zero")
        self._profile = dict(sorted(profile.items()))
        self._seen: dict[int, deque[tuple[int, float]]] = {}
        self._round = 0

    def observe(self, rows: int, seconds: float) -> None:
        self._round += 1
        self._seen.setdefault(rows, deque(maxlen=_WINDOW)).append((self._round, seconds))

    def seconds(self, rows: int) -> float:
        scale = self._measured(1, self._profile[1]) / self._profile[1]
        return self._measured(rows, self._profiled(rows) * scale)

    def known(self, rows: int) -> int:
        """How many measurements of that many rows still count."""
        return sum(at > self._round - _MEMORY for at, _ in self._seen.get(rows, ()))

    def _measured(self, rows: int, expected: float) -> float:
        recent = [seconds for at, seconds in self._seen.get(rows, ()) if at > self._round - _MEMORY]
        return median([expected, *recent]) if len(recent) < _WINDOW else median(recent)

    def _profiled(self, rows: int) -> float:
        """The profile, with straight lines between its points and on beyond the last."""
        known = list(self._profile)
        if rows in self._profile or len(known) == 1:
            return self._profile.get(rows, self._profile[known[0]] * rows)
        above = next((i for i, each in enumerate(known) if each > rows), len(known) - 1)
        left, right = known[above - 1], known[above]
        slope = (self._profile[right] - self._profile[left]) / (right - left)
        return max(self._profile[left] + slope * (rows - left), self._profile[1] * 0.5)
