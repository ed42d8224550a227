"""The benchmark of the slowest texts runs on the embedded pair, with the right and with a wrong draft."""

from __future__ import annotations

import pytest

from benchmarks.promise import KINDS
from tests.benchmarks.conftest import Program

pytestmark = pytest.mark.slow


def test_promise(program: Program) -> None:
    result = program("benchmarks.promise", "--prompts", 2, "--tokens", 12, "--repeats", 1, "--temperature", 0,
                     "--drafts", "right", "--drafts", "wrong", "--drafts", "none")  # fmt: skip
    assert [row["draft"] for row in result["rows"]] == ["right", "wrong", "none"]
    for row in result["rows"]:
        assert row["prompts"] == 2 and 0 < row["slowest"] <= row["worst_decile"] <= row["fastest"]
        assert row["slowest"] <= row["mean"] <= row["fastest"] and 0 <= row["below"] <= 1
        assert row["host_us"]["plain arm, plain"] > 0
        assert row["said"]["prompts"] <= 2 and sorted(row["said"]["error"]) == row["said"]["error"]
        assert set(row["host_us"]) <= {"plain arm, plain", *(f"autopilot, {kind}" for kind in KINDS)}


@pytest.mark.parametrize("by", ["chat", "run"])
def test_what_is_said_of_an_answer_is_compared_with_what_is_measured(program: Program, by: str) -> None:
    result = program("benchmarks.said_speedup", "--by", by, "--answers", 2, "--tokens", 16, "--busy", 1)
    assert result["answers"] == 2 and result["beyond_the_bound"] == 0
    assert all(row["stated"] > 0 and row["measured"] > 0 for row in result["rows"])
