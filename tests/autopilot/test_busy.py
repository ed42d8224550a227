"""Devices that become slower within a text, on recorded texts and a virtual clock."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest

from edgespec.autopilot.stats import DraftStats
from tests.autopilot.replay import CURVES, Clock, ReplayDrafter, adaptive, make_profile, plain_s, replay
from tests.autopilot.test_replay import GREEDY, make_clock

SPELL, SLOWER = 8, 3.6  # rounds, times


class BusyClock(Clock):
    """Every second eight rounds measure 3.6 times what they cost."""

    n_rounds = 0

    def noise(self) -> float:
        self.n_rounds += 1
        return SLOWER if self.n_rounds // SPELL % 2 else 1.0


def speed(kind: type[Clock], curve: str) -> float:
    """Times plain decoding, the geometric mean over texts."""
    quiet = make_clock(curve)
    clock = kind(quiet.curve, quiet.draft_s)
    draft_stats, speeds = DraftStats(make_profile(clock)), []
    for trace in GREEDY:
        model = ReplayDrafter(trace)
        speeds.append(plain_s(trace, clock) / replay(adaptive(draft_stats, [model]), [model], trace, clock))
    return float(np.exp(np.mean(np.log(speeds))))


@pytest.mark.parametrize("curve, least", [("1B, Q4_0", 0.85), ("8B, Q4_0", 0.80), ("1B, Q8_0", 0.93)])
def test_busy_moments_are_not_charged_to_drafts(curve: str, least: float) -> None:
    """A plain round in which the machine becomes slower is one step, not several."""
    assert speed(BusyClock, curve) > least * speed(Clock, curve)


class SlowingClock(Clock):
    """A device whose speed changes with time; `phases` are the seconds of plain decoding and of the controller in each.

    whole  how many times slower all of it is at a time, in plain steps
    rows   the same for what further rows add to a forward, which a lower clock of the cores slows and not the memory
    """

    def __init__(self, quiet: Clock, whole: Callable[[float], float], rows: Callable[[float], float]) -> None:
        super().__init__(quiet.curve, quiet.draft_s, quiet.rng)
        self.now = 0.0
        self.phases: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._whole, self._rows = whole, rows

    def forward_s(self, rows: int, position: int) -> float:
        plain = self.curve(1)
        return plain + self._rows(self.now) * (self.curve(rows) - plain)

    def slowdown(self) -> float:
        return self._whole(self.now)

    def spend(self, n_tokens: int, seconds: float) -> None:
        phase = self.phases[round(self._whole(self.now)), round(self._rows(self.now))]
        phase[0] += n_tokens * self.curve(1) * self._whole(self.now)
        phase[1] += seconds
        self.now += seconds


def steady(_now: float) -> float:
    return 1.0


def half(now: float) -> float:
    return 2.0 if now % 192 >= 96 else 1.0


def waves(now: float) -> float:
    return 1.5 + 0.5 * math.sin(2 * math.pi * now / 40)


def game(now: float) -> float:
    """Bursts of six plain steps, a fifth of the time."""
    return 3.0 if (int(now) // 6 * 2654435761 >> 7) % 5 == 0 else 1.0


SLOWING = {
    "half the speed": (half, steady),
    "waves": (waves, steady),
    "a game": (game, steady),
    "half the speed of rows": (steady, half),
    "waves of rows": (steady, waves),
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("name", SLOWING)
def test_a_device_that_becomes_slower_is_followed(name: str, curve: str) -> None:
    """In no phase is decoding slower than 0.95 of plain decoding."""
    quiet = make_clock(curve, seed=1)
    clock = SlowingClock(quiet, *SLOWING[name])
    draft_stats = DraftStats(make_profile(quiet))
    for trace in GREEDY:
        model = ReplayDrafter(trace)
        replay(adaptive(draft_stats, [model]), [model], trace, clock)
    speeds = {phase: plain / seconds for phase, (plain, seconds) in clock.phases.items()}
    assert len(speeds) == 2 and min(speeds.values()) > 0.95, speeds
