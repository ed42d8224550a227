"""The time that the controller takes itself: deciding, asking lookups, learning, recording; and when it takes none."""

from __future__ import annotations

from typing import Literal

Kind = Literal["look", "decide"]
"""Of a round: whether only a quick look was taken, or drafts were made and weighed."""

_MAX_OUTLIER = 2.0  # limit of a single measurement, as a multiple of the usual one: the machine may be busy
_WEIGHT = 0.05  # of a new measurement in the usual one
_LOOK_SHARE = 0.005  # of the time of plain decoding that looks may take while nothing is gained
_DECIDING_SHARE = 0.01  # of a plain step, that a decision may take in every round
_MAX_REST = 16  # rounds


class OwnTime:
    """Usual seconds of a round besides its forwards; shared by all texts."""

    def __init__(self) -> None:
        self._usual: dict[Kind, float] = {}

    def add(self, kind: Kind, seconds: float) -> float:
        """A round took `seconds` besides its forwards; returns what is charged for it."""
        usual = self._usual.get(kind, seconds)
        charged = min(seconds, _MAX_OUTLIER * usual)
        self._usual[kind] = usual + _WEIGHT * (charged - usual)
        return charged

    @property
    def look_s(self) -> float:
        return self._usual.get("look", 0.0)

    @property
    def deciding_s(self) -> float:
        """Seconds that a decision adds to those of a look."""
        return max(0.0, self._usual.get("decide", 0.0) - self.look_s)

    def is_negligible(self, plain_s: float) -> bool:
        """Whether a decision in each round would take next to nothing of plain steps of `plain_s`."""
        return self.deciding_s <= _DECIDING_SHARE * plain_s


class Pace:
    """How many rounds of one text go by without a look: more and more while nothing is gained, none after a gain.

    None where a look takes next to nothing of a plain step.
    """

    def __init__(self, own_time: OwnTime) -> None:
        self._own_time = own_time
        self._left = 0  # rounds that will go by
        self._last = 0  # of the last rest
        self.is_passing = False  # whether the present round goes by

    @property
    def is_resting(self) -> bool:
        """Whether the next round goes by."""
        return self._left > 0

    def begin_round(self) -> bool:
        """A round begins; returns whether it goes by."""
        self.is_passing = self._left > 0
        self._left -= self.is_passing
        return self.is_passing

    def rest(self, plain_s: float) -> None:
        """A look has shown nothing that pays."""
        most = min(_MAX_REST, int(self._own_time.look_s / (_LOOK_SHARE * plain_s)))
        self._left = self._last = min(2 * self._last + 1, most)

    def gain(self) -> None:
        """A draft has gained tokens."""
        self._last = 0
