"""The program that compares the autopilot with a rule runs on the recorded texts."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tests.autopilot.autopilot_rule import main

pytestmark = pytest.mark.slow


def test_autopilot_rule() -> None:
    done = CliRunner().invoke(main, ["--texts", "1", "--seeds", "1", "--curve", "a GPU", "--step-ms", "0,50"])
    assert done.exit_code == 0, done.output
    *table, last = done.output.splitlines()
    results = json.loads(last)["results"]
    assert len(table) == 2 + len(results)
    assert [(row["texts"], row["step_ms"]) for row in results] == [
        (texts, ms) for texts in ("greedy", "sampled") for ms in (0.0, 50.0)
    ]
    for row in results:
        assert row["autopilot"] > 0.9 and row["rule"] > 0.5 and row["fixed"] > 0.5
