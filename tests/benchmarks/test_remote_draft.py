"""The benchmark of a draft on another machine runs on the embedded pair."""

from __future__ import annotations

import pytest

from benchmarks.slow_link import find_obstacle
from tests.benchmarks.conftest import Program

OBSTACLE = find_obstacle()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(OBSTACLE is not None, reason=f"no network of namespaces here: {OBSTACLE}"),
]


def test_remote_draft(program: Program) -> None:
    result = program("benchmarks.remote_draft", "--rtt-ms", 30, "--prompts", 1, "--tokens", 16, "--repeats", 1)
    (row,) = result["delays"]
    assert row["rtt_ms"] >= 30 and row["texts"] == 5 and row["other_texts"] == row["near_ties"]
    assert row["plain"]["gain"] == 1.0 and row["plain"]["drafted_rounds"] == 0
    assert row["waiting"]["draft_ms"] >= 25 and row["waiting"]["drafted_rounds"] > 0, "each draft is a round trip"
    killed, restarted = result["killed"], result["restarted"]
    assert killed["equal"] and killed["drafted_before"] and not killed["drafted_after"] and len(killed["notices"]) == 1
    assert restarted["equal"] and not restarted["notices"]


def test_a_lossy_network(program: Program) -> None:
    sizes = ("--prompts", 1, "--tokens", 6, "--repeats", 1, "--temperature", 0.8)
    result = program("benchmarks.remote_draft", "--rtt-ms", 5, "--loss", 0.05, *sizes)
    assert result["delays"][0]["ahead"]["tokens_per_second"] > 0
