"""The instruments' arithmetic."""

from __future__ import annotations

import pytest

from edgespec.core.metrics import Meter
from edgespec.core.protocols import Step
from edgespec.tui.live_stats import LiveStats


def test_plain_decoding_is_what_this_answer_would_have_taken_and_not_what_was_measured_on_load() -> None:
    """As the metrics have it at the end: beside a screen that is drawn, plain decoding is slower too."""
    live_stats, meter = LiveStats(usual_plain_speed=500.0, requested_s=10.0), Meter(3, 10.0)
    assert (live_stats.plain_speed, live_stats.times_plain) == (500.0, None)
    for step in (
        Step(0, (7,), 0, 0, 0, at_s=11.0),
        Step(1, (1, 2, 3), 4, 2, 3, at_s=12.0, plain_steps=2.0),
        Step(2, (4,), 0, 0, 0, at_s=14.0, plain_steps=1.0),
    ):
        live_stats.add(step)
        meter.add(step)
    assert live_stats.times_plain == meter.metrics().times_plain == pytest.approx(4 / 3)
    assert live_stats.plain_speed == pytest.approx(4 / 3 / (4 / 3))


def test_the_speeds_that_are_shown_have_the_ratio_that_is_shown() -> None:
    live_stats = LiveStats(usual_plain_speed=500.0)
    for index in range(4):
        live_stats.add(Step(index, (7,), 0, 0, 0, at_s=1.0 + index / 4, draft_s=0.025))
    assert live_stats.mean_speed and live_stats.plain_speed
    assert live_stats.mean_speed / live_stats.plain_speed == pytest.approx(0.9) == pytest.approx(live_stats.times_plain)


def test_nothing_is_said_of_plain_decoding_while_it_is_not_known() -> None:
    live_stats = LiveStats(usual_plain_speed=500.0)
    for index in range(4):
        live_stats.add(Step(index, (7, 8), 1, 1, 1, at_s=1.0 + index / 4))
    assert (live_stats.plain_speed, live_stats.times_plain) == (None, None)
