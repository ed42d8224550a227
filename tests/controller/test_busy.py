"""Moments in which other programs slow the machine down, on recorded texts and a virtual clock."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.controller.stats import DraftStats
from tests.controller.replay import Clock, ReplayDrafter, adaptive, make_profile, plain_s, replay
from tests.controller.test_replay import GREEDY, make_clock

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
