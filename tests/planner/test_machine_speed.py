"""How fast this machine reads weights: a measurement of a small shape, and what is stored of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.planner import machine_speed
from edgespec.planner.machine_speed import Rate, load_rate, measure_rate


def test_a_rate_is_measured_on_a_shape_of_the_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_WIDTH": 256, "_FEED_FORWARD": 512, "_BLOCKS": 2, "_PROFILE_S": 0.05}.items():
        monkeypatch.setattr(machine_speed, name, value)
    rate = machine_speed._measure("Q4_K", tmp_path)
    assert 1 in rate.rows and all(seconds > 0 for seconds in rate.rows.values())


def test_a_rate_is_stored_for_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(machine_speed, "run_in_child", lambda *_args, check: Rate({1: 1e-10, 2: 2e-10}))
    assert load_rate("Q4_K") is None and measure_rate("I8") is None
    assert measure_rate("Q4_K") == load_rate("Q4_K") == Rate({1: 1e-10, 2: 2e-10})
    assert load_rate("Q8_0") is None
    monkeypatch.setattr(machine_speed, "_VERSION", 0)
    assert load_rate("Q4_K") is None


def test_the_time_of_a_round_grows_with_the_bytes() -> None:
    rate = Rate({1: 1e-10, 4: 3e-10})
    small, large = rate.forward_s(1e9), rate.forward_s(2e9)
    assert large[1] - small[1] == pytest.approx(0.1) and large[4] - small[4] == pytest.approx(0.3)
