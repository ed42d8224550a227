"""Medians of recent measurements, apart for each band of positions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from statistics import median

_WINDOW = 15  # latest measurements of one kind; with fewer, the expected value is one of them
_MAX_AGE = 256  # rounds; the machine may have changed since an older measurement
_MAX_OUTLIER = 2.0  # limit of a single measurement, as a multiple of the expected value: the machine may be busy
_FIRST_BAND = 1024  # tokens of context in the first band of positions; each further band ends at twice the last one's

Measured = deque[tuple[int, float]]  # (round, value)
Average = Callable[[Sequence[float]], float]


class BandMedians:
    """Of several kinds of measurements, each named by a key."""

    def __init__(self) -> None:
        self._round = 0
        self._bands: dict[int, dict[Hashable, Measured]] = {0: {}}
        self._index = 0  # of the present band
        self._nearest = [self._bands[0]]  # all bands, the nearest first

    def move_to(self, position: int) -> bool:
        """The next measurements are at `position`; returns whether that is in another band."""
        index = (position // _FIRST_BAND).bit_length()
        if index == self._index:
            return False
        self._index = index
        self._bands.setdefault(index, {})
        self._nearest = [self._bands[each] for each in sorted(self._bands, key=lambda each: abs(each - index))]
        return True

    def count_round(self) -> None:
        """Measurements grow older by one round."""
        self._round += 1

    def add(self, key: Hashable, value: float) -> None:
        self._nearest[0].setdefault(key, deque(maxlen=_WINDOW)).append((self._round, value))

    @property
    def keys(self) -> list[Hashable]:
        """What was ever measured."""
        return list(dict.fromkeys(key for band in self._nearest for key in band))

    def count(self, key: Hashable) -> int:
        """The number of recent measurements in the present band and the two beside it."""
        beside = (self._bands.get(self._index + step, {}) for step in (-1, 0, 1))
        return sum(len(self._recent(band.get(key))) for band in beside)

    def estimate(self, key: Hashable, expected: float, average: Average = median) -> float | None:
        """The median of the present band, given that of the nearest other band with recent measurements.

        `expected` is the value where nothing is measured. None if nothing is. `average` may be another one.
        """
        recent = [values for band in self._nearest if (values := self._recent(band.get(key)))][:2]
        for values in reversed(recent):
            expected = _estimate(values, expected, average)
        return expected if recent else None

    def _recent(self, measured: Measured | None) -> list[float]:
        oldest = self._round - _MAX_AGE
        return [value for at, value in measured or () if at > oldest]


def _estimate(recent: list[float], expected: float, average: Average) -> float:
    """Of few measurements `expected` is one, so that one slow round decides nothing."""
    if len(recent) == 1:
        recent = [min(recent[0], _MAX_OUTLIER * expected)]
    return average(recent if len(recent) == _WINDOW else [expected, *recent])
