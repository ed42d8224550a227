"""The benchmark of MLX ranks on a slow network runs on the embedded pair."""

from __future__ import annotations

import pytest

from benchmarks.slow_link import find_obstacle
from tests.benchmarks.conftest import Program

OBSTACLE = find_obstacle()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(OBSTACLE is not None, reason=f"no network of namespaces here: {OBSTACLE}"),
]


def test_ring(program: Program) -> None:
    result = program("benchmarks.ring", "--ranks", 2, "--rtt-ms", 10, "--prompts", 1, "--tokens", 6, "--repeats", 1)
    assert [row["set_ms"] for row in result["delays"]] == [0.0, 10.0]
    for row in result["delays"]:
        assert row["texts"] == 2 and row["other_texts"] == row["near_ties"]
    far = result["delays"][1]
    assert far["network_s"] > 0 and far["formula_gain"] > 0 and far["plain"]["gain"] == 1.0
