"""What a bench says in words, and what it writes down."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from edgespec.autopilot.profile import DraftCost
from edgespec.bench.records import describe_record
from edgespec.bench.summary import format_table, summarize
from tests.bench.lines import COST, FAULT, HEADER, HINDSIGHT, run, summary_of


def test_a_bench_may_end_before_anything_ran() -> None:
    summary = summarize([HEADER])
    assert (summary.runs, summary.arms, summary.findings()) == (0, (), {})
    assert "python-6m" in format_table(summary)


@pytest.mark.parametrize("speeds", [{"plain": 10}, {"autopilot": 10}, {"plain": None, "autopilot": None}])
def test_little_data(speeds: dict[str, float | None]) -> None:
    summary = summary_of(*(run(arm, "a", speed) for arm, speed in speeds.items()))
    table = format_table(summary)
    assert ("\nautopilot, category " in table) == ("autopilot" in speeds)
    assert all(f"\n{arm} " in table for arm in speeds) and json.dumps(summary.describe(), allow_nan=False)


def test_lines_of_the_raw_data() -> None:
    """Each is JSON with the kind of its record."""
    drafts = {"pard": DraftCost({1: 0.01, 4: 0.02}, 0.005)}
    records = [HEADER, replace(COST, drafts=drafts), run("plain", "a", 10), run("model 3", "a", 20, fork=FAULT)]
    header, cost, plain, fork = (json.loads(json.dumps(describe_record(each), allow_nan=False)) for each in records)
    assert (header["kind"], header["model"], cost["kind"], plain["kind"]) == ("header", "python-6m", "cost", "run")
    assert cost["rows"] == {"1": 0.02, "2": 0.03} and cost["drafts"]["pard"]["units"] == {"1": 0.01, "4": 0.02}
    assert (plain["metrics"]["tokens_per_second"], plain["fork"]) == (10, None)
    assert fork["fork"] == {"position": 1, "gap": 5.0, "noise": 0.01, "near_tie": False}


def test_figures_for_others_have_no_folders() -> None:
    header = replace(HEADER, model="/home/me/a.gguf", draft="ngram+/home/me/b.gguf")
    shared = summarize([header, COST, run("plain", "a", 10), run("model 3", "a", 20, fork=FAULT)]).describe()
    assert (shared["header"]["model"], shared["header"]["draft"]) == ("a.gguf", "ngram+b.gguf")
    assert shared["faults"] == shared["forks"] == 1 and shared["runs"] == 2
    assert "/home/me" not in json.dumps(shared, allow_nan=False)


def test_table() -> None:
    lines = [run(arm, prompt, speed) for prompt, speeds in HINDSIGHT.items() for arm, speed in speeds.items()]
    shown = [line.split() for line in format_table(summary_of(*lines)).splitlines()]
    assert ["plain", "2", "1.00", "(1.00-1.00)", "1.00", "0%", "1.00", "-", "10.0", "100.0", "-"] in shown
    assert ["ngram", "7", "2", "1.00", "(0.50-2.00)", "0.65", "50%", "1.00", "-", "12.5", "80.0", "-"] in shown
    assert ["chat", "2", "1.41", "(1.10-1.80)", "1.17", "0%", "1.00", "-", "14.5", "69.0", "-"] in shown
    assert ["autopilot", "/", "best", "fixed:", "1.17", "(0.92-1.50)"] in shown


def test_the_table_fits_and_steers_no_terminal() -> None:
    long = "\x1b[31m\u202e" + "x" * 150
    header = replace(HEADER, model=long, processor=long, versions={long: long})
    lines = [run(arm, p, 10, category=long) for p in "ab" for arm in ("plain", "autopilot", long)]
    text = format_table(summarize([header, *lines]))
    assert max(map(len, text.splitlines())) <= 100
    assert text.replace("\n", "").isprintable()
