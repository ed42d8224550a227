"""Medians of recent measurements, apart for each band of positions."""

from __future__ import annotations

from collections import deque
from statistics import median

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
        self._measured: dict[int | str, dict[int, Measured]] = {}  # by key, then by band

    def move_to(self, position: int) -> bool:
        """The next measurements are at `position`; returns whether that is in another band."""
        before, self._band = self._band, (position // _FIRST_BAND).bit_length()
        return self._band != before

    def add(self, key: int | str, value: float) -> None:
        bands = self._measured.setdefault(key, {})
        bands.setdefault(self._band, deque(maxlen=_WINDOW)).append((self.round, value))

    @property
    def keys(self) -> list[int | str]:
        """The keys ever measured."""
        return list(self._measured)

    def count(self, key: int | str) -> int:
        """The number of recent measurements in the present band and the two beside it."""
        bands = self._measured.get(key, {})
        return sum([len(self._recent(bands[band])) for band in bands if abs(band - self._band) <= 1])

    def estimate(self, key: int | str, expected: float) -> float | None:
        """The median of recent measurements in the nearest band with any, usually the present one; None without any.

        While that band has few, the median includes an expected value: the estimate of the next nearest band with
        measurements or, if there is none, `expected`.
        """
        bands = self._measured.get(key, {})
        nearest = sorted(bands, key=lambda band: abs(band - self._band))
        recent = [values for band in nearest if (values := self._recent(bands[band]))][:2]
        for values in reversed(recent):
            if len(values) == 1:
                values = [min(values[0], _MAX_OUTLIER * expected)]
            # The expected value is one of few measurements, so that one slow round decides nothing.
            expected = median(values if len(values) == _WINDOW else [expected, *values])
        return expected if recent else None

    def _recent(self, measured: Measured) -> list[float]:
        oldest = self.round - _MAX_AGE
        return [value for at, value in measured if at > oldest]
