"""The time that the controller takes itself: deciding, asking lookups, learning, recording; and when it takes none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

Kind = Literal["look", "decide"]
"""Of a round: whether only a quick look was taken, or drafts were made and weighed."""

_MAX_OUTLIER = 2.0  # limit of a single measurement, as a multiple of the usual one: the machine may be busy
_WEIGHT = 0.05  # of a new measurement in the usual one
_WEIGHT_BELOW = 0.3  # likewise, of a quicker one
_BARE_WEIGHT = 0.01  # of a measurement above the quickest ones
_LOOK_SHARE = 0.005  # of the time of plain decoding that looks may take while nothing is gained
_DECIDING_SHARE = 0.01  # of a plain step, that a decision may take in every round
_MAX_REST = 32  # rounds
_MAX_BLIND = 16  # of them without a glance
_DEBT_SHARE = 0.01  # of a plain step, that each round pays back of the debt
_FREE_DEBT = 1.0  # plain steps, above which a text begins with rounds that go by until they have paid it back
_MAX_DEBT = 3.0  # plain steps


class OwnTime:
    """Usual seconds of drafting in rounds without a drafter that takes time; shared by all texts.

    What is charged for a round is what exceeds the quickest rounds, those of plain decoding. The debt is what was
    charged, in plain steps, less what drafts have gained and what the rounds have paid back.
    """

    def __init__(self) -> None:
        self._usual: dict[Kind, float] = {}
        self._bare_s: float | None = None
        self._debt = 0.0

    def add(self, kind: Kind, seconds: float) -> float:
        """A round took `seconds`; returns what is charged for it. The first of its kind, in a cold process, is not."""
        seconds = max(0.0, seconds - (self._bare_s or 0.0))
        usual = self._usual.get(kind)
        if usual is None:
            self._usual[kind] = seconds
            return 0.0
        charged = min(seconds, _MAX_OUTLIER * usual)
        self._usual[kind] = usual + (_WEIGHT if charged > usual else _WEIGHT_BELOW) * (charged - usual)
        return charged

    def add_passed(self, seconds: float) -> float:
        """A round that went by took `seconds`; returns what is charged for it."""
        bare_s = seconds if self._bare_s is None else self._bare_s
        weight = _BARE_WEIGHT if seconds > bare_s else 0.5
        self._bare_s = bare_s + weight * (seconds - bare_s)
        return min(max(0.0, seconds - self._bare_s), _MAX_OUTLIER * self._bare_s)

    def settle(self, rounds: int, steps: float) -> None:
        """`rounds` have ended that took or, below zero, gained `steps` plain steps beside their forwards."""
        self._debt = min(max(0.0, self._debt + steps - _DEBT_SHARE * rounds), _MAX_DEBT)

    @property
    def rounds_in_debt(self) -> int:
        """Rounds that have to go by until the debt is small again."""
        return math.ceil(max(0.0, self._debt - _FREE_DEBT) / _DEBT_SHARE)

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


class PassedRounds:
    """Rounds without a look that are not recorded yet."""

    def __init__(self) -> None:
        self._n, self._seconds = 0, 0.0

    def add(self, seconds: float) -> None:
        """One more, which is charged with `seconds`."""
        self._n += 1
        self._seconds += seconds

    def take(self) -> tuple[int, float]:
        """(their number, the seconds that they are charged with); none are left."""
        taken = self._n, self._seconds
        self._n, self._seconds = 0, 0.0
        return taken


class Pace:
    """Which rounds of one text go by without a look, where a look takes a part of a plain step that matters.

    After a look that has shown nothing, rounds go by for a while, and a glance at what lookups promise can end that
    early. After a decision that was in vain no glance is taken either: for 1, 3, 7 and more rounds, until something is
    gained. A text of lookups that begins in debt begins with rounds without a glance, until that is paid back.
    """

    def __init__(self, own_time: OwnTime) -> None:
        self._own_time = own_time
        self._left = self._blind = 0  # rounds that will go by; those of them without a glance
        self._last_blind = 0
        self.is_passing = False  # whether the present round goes by

    def begin_text(self) -> None:
        """A text begins for which only lookups are expected to draft."""
        self._left = self._blind = self._own_time.rounds_in_debt

    @property
    def is_resting(self) -> bool:
        """Whether the next round goes by unless a glance ends it."""
        return self._left > 0

    def begin_round(self, glance: Callable[[], bool]) -> bool:
        """A round begins; returns whether it goes by. `glance` tells whether lookups promise something."""
        self.is_passing = self._left > 0 and (self._blind > 0 or not glance())
        self._left = self._left - 1 if self.is_passing else 0
        self._blind = max(0, self._blind - 1)
        return self.is_passing

    def rest(self, plain_s: float) -> None:
        """A look has shown nothing that pays."""
        self._left = min(_MAX_REST, int(self._own_time.look_s / (_LOOK_SHARE * plain_s)))

    def rest_blind(self, plain_s: float, rounds: int) -> None:
        """It has shown something, in vain; `rounds`: at least so many pass until a decision can be afforded."""
        self.rest(plain_s)
        self._last_blind = min(2 * self._last_blind + 1, self._left, _MAX_BLIND)
        self._blind = max(self._last_blind, min(rounds, _MAX_BLIND))
        self._left = max(self._left, self._blind)

    def gain(self) -> None:
        """A draft has gained tokens."""
        self._last_blind = 0
