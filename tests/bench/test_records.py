"""A bench's file as an interrupted or damaged run leaves it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from edgespec.bench.runner import Cost, Run, read_records
from edgespec.bench.summary import format_table, summarize
from edgespec.controller.cost_model import DraftCost, Profile
from edgespec.errors import InvalidRequest
from tests.bench.lines import COST, HEADER, run, write


def test_a_cut_last_line_is_ignored(tmp_path: Path) -> None:
    lines = [HEADER, COST, run("plain", "ä", 10), run("autopilot", "ä", 20)]
    whole = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines).encode()
    start = whole.rindex(b"\n") + 1
    file = tmp_path / "bench.jsonl"
    file.write_bytes(whole)
    records = read_records(file)
    assert len(records) == 4
    for end in range(start, len(whole)):
        file.write_bytes(whole[:end])
        assert read_records(file) == records[:3], whole[start:end]
    file.write_bytes(whole[:-1] + b"\n")
    assert read_records(file) == records[:3]


def test_a_bench_may_end_anywhere(tmp_path: Path) -> None:
    file = write(tmp_path / "bench.jsonl", HEADER)
    summary = summarize(read_records(file))
    assert (summary.runs, summary.parts, summary.points) == (0, (), ())
    assert "python-6m" in format_table(summary)


GOOD = run("plain", "a", 10)


@pytest.mark.parametrize(
    ("lines", "number", "reason"),
    [
        (["{", json.dumps(GOOD)], 1, "not JSON"),
        (["{"], 1, "not JSON"),
        ([], 1, "not JSON"),
        ([json.dumps(HEADER), "", "{'", json.dumps(GOOD)], 3, "not JSON"),
        ([json.dumps(HEADER), "[" * 100_000, json.dumps(GOOD)], 2, "not JSON"),
        ([json.dumps(GOOD)], 1, "header"),
        ([json.dumps(HEADER), json.dumps(HEADER)], 2, "header"),
        ([json.dumps(HEADER), "[1]"], 2, "header"),
        ([json.dumps(HEADER), '{"kind": ["run"]}'], 2, "header"),
        ([json.dumps(HEADER), json.dumps({k: v for k, v in GOOD.items() if k != "arm"})], 2, "arm is missing"),
        ([json.dumps(HEADER), json.dumps(run("plain", "a", 10, ttft_s="soon"))], 2, "'soon' has the wrong type"),
        ([json.dumps(HEADER), json.dumps(run("plain", "a", 10, ttft_s=math.nan))], 2, "nan has the wrong type"),
        ([json.dumps(HEADER), json.dumps(run("plain", "a", 10, ttft_s=10**400))], 2, "too large"),
        ([json.dumps(HEADER), json.dumps(run("plain", "a", 10, emitted_tokens=True))], 2, "True has the wrong type"),
        ([json.dumps(HEADER), json.dumps(run("plain", "a", 10, emitted_tokens=1.5))], 2, "1.5 has the wrong type"),
        ([json.dumps(HEADER), json.dumps(run("plain", "a", 10, tokens_per_second=0))], 2, "not above zero"),
        ([json.dumps(HEADER), json.dumps(GOOD | {"metrics": 3})], 2, "3 has the wrong type"),
        ([json.dumps(HEADER), json.dumps(COST | {"rows": {"2": 0.1}})], 2, "one row"),
        ([json.dumps(HEADER), json.dumps(COST | {"rows": {"1": 0.1, "2": 0}})], 2, "above zero"),
        ([json.dumps(HEADER), json.dumps(COST | {"rows": {"one": 0.1}})], 2, "invalid literal"),
        ([json.dumps(HEADER), json.dumps(COST | {"rows": [0.1]})], 2, "has the wrong type"),
        ([json.dumps(HEADER), json.dumps({k: v for k, v in COST.items() if k != "drafts"})], 2, "drafts is missing"),
        (
            [json.dumps(HEADER), json.dumps(COST | {"drafts": {"a": {"units": {}, "read_s": 0, "varies": False}}})],
            2,
            "time of a unit",
        ),
        (
            [json.dumps(HEADER), json.dumps(COST | {"drafts": {"a": {"units": {"1": 1}, "varies": False}}})],
            2,
            "read_s is missing",
        ),
        ([json.dumps(HEADER), json.dumps(COST | {"drafts": {"a": 0.1}})], 2, "has the wrong type"),
    ],
)
def test_damage_is_told_with_file_and_line(tmp_path: Path, lines: list[str], number: int, reason: str) -> None:
    file = tmp_path / "bench.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(InvalidRequest, match=reason) as caught:
        read_records(file)
    assert f"{file}, line {number}: " in caught.value.message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        read_records(tmp_path / "none.jsonl")


def test_records_are_what_the_file_says(tmp_path: Path) -> None:
    header, cost, record = read_records(write(tmp_path / "bench.jsonl", HEADER, COST, run("plain", "a", 10, bound_s=1)))
    assert isinstance(record, Run)
    assert (record.temperature, record.bound_s, record.metrics.tokens_per_second) == (0.0, 1.0, 10.0)
    summary = summarize([header, cost, record])
    assert summary.costs[0].rows == {1: 0.02, 2: 0.03}
    profile = Profile({1: 0.02, 2: 0.03}, {"pard": DraftCost({1: 0.01, 4: 0.02}, 0.005)})
    (_, measured) = read_records(
        write(tmp_path / "bench.jsonl", HEADER, COST | json.loads(json.dumps(asdict(profile))))
    )
    assert isinstance(measured, Cost) and (measured.rows, measured.drafts) == (profile.rows, profile.drafts)
    assert summary.header.versions == {"edgespec": "0.1.0", "mlx_lm": None}
