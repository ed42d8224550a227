"""What a bench says in words and as a dictionary."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from edgespec.bench.runner import read_records
from edgespec.bench.summary import format_table, summarize
from tests.bench.lines import HEADER, HINDSIGHT, run, summary_of, write


def test_the_dictionary_is_json(tmp_path: Path) -> None:
    lines = [run(arm, prompt, speed) for prompt, speeds in HINDSIGHT.items() for arm, speed in speeds.items()]
    summary = summary_of(tmp_path, *lines)
    loaded = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
    assert loaded["header"]["model"] == "python-6m"
    assert loaded["parts"][0]["best_fixed"] == "model 3"
    assert loaded["parts"][0]["arms"][1]["speedup"]["geomean"] == pytest.approx(math.sqrt(1.8 * 1.1))
    assert len(loaded["points"]) == 8


def test_table(tmp_path: Path) -> None:
    lines = [run(arm, prompt, speed) for prompt, speeds in HINDSIGHT.items() for arm, speed in speeds.items()]
    shown = [line.split() for line in format_table(summary_of(tmp_path, *lines)).splitlines()]
    assert ["plain", "2", "1.00", "(1.00-1.00)", "1.00", "0%", "1.00", "-", "10.0", "100.0", "-"] in shown
    assert ["ngram", "7", "2", "1.00", "(0.50-2.00)", "0.65", "50%", "1.00", "-", "12.5", "80.0", "-"] in shown
    assert ["chat", "2", "1.41", "(1.10-1.80)", "1.17", "0%", "1.00", "-", "14.5", "69.0", "-"] in shown
    assert ["autopilot", "/", "best", "fixed:", "1.17", "(0.92-1.50)"] in shown


def test_the_table_fits_and_steers_no_terminal(tmp_path: Path) -> None:
    long = "\x1b[31m\u202e" + "x" * 150
    header = HEADER | {"model": long, "label": "cost-faithful 1B", "processor": long, "versions": {long: long}}
    lines = [run(arm, p, 10, category=long) for p in "ab" for arm in ("plain", "autopilot", long)]
    text = format_table(summarize(read_records(write(tmp_path / "bench.jsonl", header, *lines))))
    assert max(map(len, text.splitlines())) <= 100
    assert text.replace("\n", "").isprintable()
    assert text.startswith("*** cost-faithful 1B ***\n")
