"""The benchmark of workers on a slow network runs on the embedded pair."""

from __future__ import annotations

import pytest

from benchmarks.slow_link import find_obstacle
from tests.benchmarks.conftest import Program

OBSTACLE = find_obstacle()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(OBSTACLE is not None, reason=f"no network of namespaces here: {OBSTACLE}"),
]


def test_workers(program: Program) -> None:
    sizes = ("--prompts", 1, "--tokens", 12, "--repeats", 1)
    result = program("benchmarks.workers", "--workers", 2, "--rtt-ms", 30, *sizes)
    assert len(result["files"]) == 2 and [row["set_ms"] for row in result["delays"]] == [0.0, 30.0]
    near, far = result["delays"]
    assert near["texts"] == 2 and near["other_texts"] == near["near_ties"] and far["other_texts"] == far["near_ties"]
    assert far["plain"]["round_s"] >= 0.060 > near["plain"]["round_s"], "two workers, each of a round trip"
    assert far["formula_gain"] > 1 and far["plain"]["gain"] == 1.0


def test_a_lossy_network(program: Program) -> None:
    sizes = ("--prompts", 1, "--tokens", 8, "--repeats", 1)
    result = program("benchmarks.workers", "--rtt-ms", 5, "--loss", 0.02, "--autopilot", *sizes)
    assert result["short_packets"] and result["delays"][1]["other_texts"] == result["delays"][1]["near_ties"]
    assert result["delays"][1]["autopilot"]["tokens_per_second"] > 0
