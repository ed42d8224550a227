"""How long a plain round takes, as measured in those of the present and the last answers."""

from __future__ import annotations

from edgespec.controller.cost_model import Profile

_DECAY = 0.99  # of the weight of a measurement, with each later one
_MIN_MEASURED = 3  # without which nothing is said
_POSITIONS = 64  # that share an expected time


class PlainRounds:
    """Rounds of an engine without a draft, with all that they take: forward, sampling, commit, the reader of steps.

    A round after more tokens takes longer as the profile says; the measurements are kept as multiples of that. Their
    mean counts and not their median: moments in which the machine was busy are part of the time of an answer too.
    """

    def __init__(self) -> None:
        self._profile: Profile | None = None
        self._forwards: object = None  # what it says of the target
        self._multiples: dict[
            int, tuple[float, float, int]
        ] = {}  # by number of peers: (their sum, their weight, their number)
        self._expected: dict[tuple[int, int], float] = {}

    def expect(self, profile: Profile | None) -> None:
        """The next rounds take what `profile` says; None where that is unknown: then all positions count as equal.

        Measurements by other profiles are forgotten.
        """
        forwards = profile and (profile.rows, profile.longer)
        if forwards != self._forwards:
            self._multiples, self._expected = {}, {}
        self._profile, self._forwards = profile, forwards

    def add(self, n_peers: int, position: int, seconds: float) -> None:
        """A round at `position`, shared with `n_peers` other generations that had no draft either."""
        total, weight, n = self._multiples.get(n_peers, (0.0, 0.0, 0))
        multiple = seconds / self._expect(n_peers, position)
        self._multiples[n_peers] = _DECAY * total + multiple, _DECAY * weight + 1, n + 1

    def estimate(self, n_peers: int, position: int) -> float | None:
        """Seconds of such a round; None where too few were measured."""
        total, weight, n = self._multiples.get(n_peers, (0.0, 0.0, 0))
        return total / weight * self._expect(n_peers, position) if n >= _MIN_MEASURED else None

    def _expect(self, n_peers: int, position: int) -> float:
        key = n_peers, position // _POSITIONS
        if key not in self._expected:
            profile = self._profile
            self._expected[key] = profile.seconds(1 + n_peers, position) if profile is not None else 1.0
        return self._expected[key]
