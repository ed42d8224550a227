"""The program that measures the host's time for a row of logits."""

from __future__ import annotations

import pytest

from tests.benchmarks.conftest import Program

pytestmark = pytest.mark.slow


def test_host_time(program: Program) -> None:
    results = program("benchmarks.host_time", "--vocabulary", "3000,4096", "--rows", "1,3", "--repeats", 1)["results"]
    assert len({(each["vocabulary"], each["logits"], each["chain"], each["rows"]) for each in results}) == len(results)
    assert len(results) == 2 * 2 * 2 * 13
    assert all(0 < each["us"][0] <= each["us"][1] <= each["us"][2] for each in results)
