"""The time that the controller takes itself: deciding, asking lookups, learning, recording; and when it takes none."""

from __future__ import annotations

from math import isfinite
from statistics import median
from typing import Any, Literal, get_args

Kind = Literal["look", "quick", "decide"]
"""Of a round: costs were recorded alone, a lookup's chain was drafted, or a draft tree was weighed."""

_MAX_OUTLIER = 2.0  # limit of a single measurement, as a multiple of the usual one: the machine may be busy
_WEIGHT = 0.05  # of a new measurement in the usual one
_WEIGHT_BELOW = 0.3  # likewise, of a quicker one
_LOOK_SHARE = 0.0015  # of the time of plain decoding that looks may take
_DECIDING_SHARE = 0.01  # of a plain step, that a decision may take in every round
_TOKENS_TO_DOUBLE = 24  # drafted tokens that take as much time as all else in a round
_MIN_DECISIONS = 8  # measured ones, before their time counts; the first ones are slow
_MEASURING_SHARE = 0.001  # of the time of rounds without a decision, for as many that measure it again
_MAX_REST = 128  # rounds
_BLIND_ROUNDS = 2  # after a round in which lookups were asked in vain
_MAX_BLIND = 64


class OwnTime:
    """Usual seconds of the controller in rounds without a drafter that takes time; shared by all texts."""

    def __init__(self) -> None:
        self._usual: dict[Kind, float] = {}
        self._n_decisions = 0
        self._n_awaited = _MIN_DECISIONS  # decisions so far, from which on their time counts
        self._waited_s = 0.0  # of rounds since a decision was measured
        self._switch_s = 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON values for `from_dict`."""
        return {
            "usual": self._usual,
            "n_decisions": self._n_decisions,
            "waited_s": self._waited_s,
            "switch_s": self._switch_s,
        }

    @staticmethod
    def from_dict(state: dict[str, Any]) -> OwnTime:
        """Raises ValueError, AttributeError, KeyError or TypeError for values that `to_dict` cannot have returned."""
        own_time = OwnTime()
        usual = {kind: _check_seconds(state["usual"][kind]) for kind in state["usual"].keys() & get_args(Kind)}
        own_time._usual = usual
        own_time._n_decisions = int(_check_seconds(state["n_decisions"]))
        own_time._waited_s = _check_seconds(state.get("waited_s", 0.0))
        own_time._switch_s = _check_seconds(state["switch_s"])
        return own_time

    def begin_text(self) -> None:
        """A text begins. Its first decisions are measured where none was for so long that they take next to nothing.

        Where steps are short, nothing else would measure them again, and a busy moment would count for ever.
        """
        if _MIN_DECISIONS * self._usual.get("decide", 0.0) < _MEASURING_SHARE * self._waited_s:
            self._n_awaited = self._n_decisions + _MIN_DECISIONS
            self._waited_s = 0.0

    def wait(self, seconds: float) -> None:
        """Rounds took `seconds` in which nothing was decided."""
        self._waited_s += seconds

    def add(self, kind: Kind, seconds: float, n_drafted: int = 0) -> float:
        """A round took `seconds`; returns what is charged for it. The first ones, in a cold process, are not.

        The usual time is that of a round without drafted tokens.
        """
        if kind == "decide":
            self._n_decisions += 1
            self._waited_s = 0.0
        usual, factor = self._usual.get(kind), _scale(n_drafted)
        if usual is None:
            self._usual[kind] = seconds / factor
            return 0.0
        charged = min(seconds, _MAX_OUTLIER * usual * factor)
        excess = charged / factor - usual
        self._usual[kind] = usual + (_WEIGHT if excess > 0 else _WEIGHT_BELOW) * excess
        return charged if kind != "decide" or self._n_decisions > _MIN_DECISIONS else 0.0

    def add_switch(self, seconds: float, plain_s: float) -> float:
        """The forward after a draft took `seconds` more than a plain one after another; returns what is charged."""
        charged = min(max(seconds, 0.0), plain_s)
        self._switch_s += _WEIGHT * (charged - self._switch_s)
        return charged

    @property
    def look_s(self) -> float:
        return self._usual.get("look", 0.0)

    def quick_s(self, n: int) -> float:
        """Seconds that a round with a lookup's chain of `n` tokens takes beside its forward, and adds to the next."""
        return self._usual.get("quick", 0.0) * _scale(n) + self._switch_s

    def is_negligible(self, plain_s: float) -> bool:
        """Whether a decision in each round would take next to nothing of plain steps of `plain_s`."""
        deciding_s = self._usual.get("decide", 0.0) if self._n_decisions >= self._n_awaited else 0.0
        return deciding_s <= _DECIDING_SHARE * plain_s


def _scale(n_drafted: int) -> float:
    """The controller's time in a round with drafted tokens, over that of one without."""
    return 1.0 + n_drafted / _TOKENS_TO_DOUBLE


def _check_seconds(value: float) -> float:
    """`value`, which is not negative. Raises ValueError."""
    if not isfinite(value) or value < 0:
        raise ValueError("not a length of time")
    return float(value)


class PassedRounds:
    """Plain rounds that were not recorded yet."""

    def __init__(self) -> None:
        self._n, self._own_s = 0, 0.0
        self._forward_s: list[float] = []

    def add(self, own_s: float, forward_s: float | None) -> None:
        """One more, in which the controller took `own_s`; `forward_s` is None where others shared the forward."""
        self._n += 1
        self._own_s += own_s
        if forward_s is not None:
            self._forward_s.append(forward_s)

    def take(self) -> tuple[int, float, float | None]:
        """(their number, seconds of the controller, median seconds of forwards of one row); none are left."""
        taken = self._n, self._own_s, median(self._forward_s) if self._forward_s else None
        self._n, self._own_s, self._forward_s = 0, 0.0, []
        return taken


class Pace:
    """Which rounds of one text go by unrecorded, where recording takes a part of a plain step that matters.

    After a round that was recorded many go by until the next; a lookup that promises something ends that early. After a
    draft that was not allowed nobody is asked: for 1, 3, 7 and more rounds, until something is gained.
    """

    def __init__(self, own_time: OwnTime) -> None:
        self._own_time = own_time
        self._left = self._blind = 0  # rounds that will go by; those of them in which nobody is asked
        self._last_blind = 0

    @property
    def is_resting(self) -> bool:
        """Whether the next round goes by unless a lookup promises something."""
        return self._left > 0

    @property
    def is_blind(self) -> bool:
        """Whether nobody is asked in the next round."""
        return self._blind > 0

    def pass_round(self) -> None:
        """A round goes by, in which lookups promised nothing or were not asked."""
        self._left -= 1
        self._blind = self._blind - 1 if self._blind else _BLIND_ROUNDS

    def rest(self, plain_s: float) -> None:
        """A round is recorded without a draft."""
        self._left = min(_MAX_REST, int(self._own_time.look_s / (_LOOK_SHARE * plain_s)))

    def rest_blind(self, plain_s: float) -> None:
        """A draft was not allowed."""
        self._blind = self._last_blind = min(2 * self._last_blind + 1, _MAX_BLIND)
        self.rest(plain_s)
        self._left = max(self._left, self._blind)

    def gain(self) -> None:
        """A draft has gained tokens."""
        self._last_blind = 0
