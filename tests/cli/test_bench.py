"""`edgespec bench` on the embedded pair, and what `edgespec run` tells and keeps of the autopilot."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.cancel import check_cancelled
from edgespec.cli.terminal import explain_rounds
from edgespec.core.protocols import Decision, Step
from edgespec.engine.engine import Engine
from tests.cli.conftest import COMMAND, Cli

TINY = ("--per-category", "1", "--max-tokens", "8", "--repeats", "1", "--draft-max", "2", "--threads", "1")
ARMS = ["plain", "autopilot", "ngram 2", "model 2", "autopilot cold"]


def outcome(stdout: str) -> dict[str, Any]:
    """The last line, which is JSON."""
    found: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    return found


def read_lines(raw: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in raw.read_text(encoding="utf-8").splitlines()]


def runs_of(raw: Path) -> list[dict[str, Any]]:
    """The generations of a file, after its header and cost curve."""
    header, cost, *runs = read_lines(raw)
    assert header["kind"] == "header" and header["model"] == "python-6m"
    assert len(header["files"]["target target.gguf"]) == 16
    assert cost["kind"] == "cost" and "1" in cost["rows"] and min(cost["rows"].values()) > 0
    assert {run["kind"] for run in runs} <= {"run"}
    return runs


def test_a_table_the_raw_data_and_the_figures(cli: Cli, tmp_path: Path) -> None:
    known = tmp_path / "cache" / "calibration"
    done = cli("bench", "--category", "chat", *TINY, "--out", "found/here")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    heading = next(i for i, line in enumerate(lines) if line.startswith("arm "))
    rows = {line[:22].strip(): line[22:].split() for line in lines[heading + 1 : heading + 6]}
    assert sorted(rows) == sorted(ARMS)
    assert rows["plain"][:2] == ["2", "1.00"], "two turns"
    found = outcome(done.stdout)
    raw = tmp_path / found["raw"]
    assert (found["bench"], found["interrupted"], raw.parent) == ("python-6m", False, tmp_path / "found" / "here")
    assert found["best fixed (with hindsight)"] in ("model 2", "ngram 2")
    runs = runs_of(raw)
    assert [(run["arm"], run["prompt"]) for run in runs] == [(arm, f"chat-1/{turn}") for arm in ARMS for turn in (1, 2)]
    assert {run["metrics"]["emitted_tokens"] for run in runs} == {8}
    assert [run["metrics"]["drafted_tokens"] for run in runs[:2]] == [0, 0]
    assert sum(run["metrics"]["drafted_tokens"] for run in runs if run["arm"] == "model 2") > 4
    assert all((run["bound_s"] is not None) == run["arm"].startswith("autopilot") for run in runs)
    assert all(run["fork"] is None or run["fork"]["near_tie"] for run in runs)
    shared = json.loads(raw.with_suffix(".share.json").read_text(encoding="utf-8"))
    assert shared["costs"][0]["rows"]["1"] > 0 and shared["faults"] == 0 and shared["header"]["processor"]
    assert {each["arm"] for each in shared["arms"]} == set(ARMS) and "chat-1" not in json.dumps(shared)
    assert str(tmp_path) not in json.dumps(shared)
    assert str(found["raw"]) in done.stderr and "tok/s" not in done.stderr
    (stored,) = known.glob("[0-9a-f]*.json")
    learned = json.loads(stored.read_text())["entries"][0]["experience"]
    assert learned["drafters"] == {}, "what a bench learns is not what use has taught"


def test_prompts_of_ones_own_those_too_long_left_out(cli: Cli, tmp_path: Path) -> None:
    prompts = [
        {"id": "long", "prompt": "x = 1\n" * 2000},
        {"prompt": "import os\n"},
        {"id": "b", "category": "code", "prompt": "def f(n):"},
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    options = (*TINY, "--per-category", "3", "--draft", "ngram", "--temperature", "0", "--temperature", "0.8")
    done = cli("bench", "--prompts", "own.jsonl", *options)
    assert done.returncode == 0
    (note,) = re.findall("note: (.*)", done.stderr)
    assert re.fullmatch(r"long is left out: the prompt has [\d,]+ (tokens|characters), .* 2,048.*", note)
    raw = tmp_path / outcome(done.stdout)["raw"]
    assert raw.parent == tmp_path / "edgespec-bench"
    runs = runs_of(raw)
    assert {run["arm"] for run in runs} == {"plain", "autopilot", "ngram 2", "autopilot cold"}
    assert {(run["prompt"], run["category"], run["temperature"]) for run in runs} == {
        (prompt, category, t) for prompt, category in (("2/1", "own"), ("b/1", "code")) for t in (0.0, 0.8)
    }
    assert all(run["fork"] is None for run in runs if run["temperature"])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--category poetry", "error: There is no prompt category 'poetry'.\nhint: Choose from chat, "),
        ("--prompts gone.jsonl", "error: Cannot read gone.jsonl: No such file or directory.\nhint: Check the path."),
        ("--prompts bad.jsonl", "error: 'bad.jsonl', line 1 is not a prompt.\nhint: Write one object a line: "),
        ("--prompts good.jsonl --category chat", "error: 'good.jsonl' has no prompts of these categories.\nhint: "),
        ("--draft none", "error: There is nothing to compare without a draft.\nhint: Use --draft auto or ngram."),
    ],
)
def test_what_cannot_be_run_is_said_at_once(cli: Cli, tmp_path: Path, options: str, told: str) -> None:
    (tmp_path / "bad.jsonl").write_text("nothing\n")
    (tmp_path / "good.jsonl").write_text('{"prompt": "x"}\n')
    done = cli("bench", *options.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(told) and done.stderr.count("\n") == 2
    assert not (tmp_path / "edgespec-bench").exists() and not (tmp_path / "cache").exists()


def test_an_interrupt_keeps_what_was_measured(environment: dict[str, str], tmp_path: Path) -> None:
    child = subprocess.Popen(
        [*COMMAND, "bench", "--category", "qa", *TINY, "--repeats", "1000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=tmp_path, text=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while not any(file.read_text().count('"run"') >= 4 for file in (tmp_path / "edgespec-bench").glob("*.jsonl")):
        assert child.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert "Traceback" not in err and "Internal error" not in err
    found = outcome(out)
    raw = tmp_path / found["raw"]
    assert found["interrupted"] is True
    assert 4 <= len(runs_of(raw)) < 1000
    assert out.count("\nplain ") == 1, "the table of what there is"


def test_an_interrupt_before_anything_was_measured(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(engine: Engine, seconds: float) -> Profile:
        if seconds > 5:  # the bench's own measurement
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                check_cancelled()
                time.sleep(0.01)
        return Profile({1: 0.01}, {"model": DraftCost({1: 0.001}, 0.0001)})

    monkeypatch.setattr(Engine, "measure", measure)
    done = cli("bench", *TINY)
    assert done.returncode == 130
    assert json.loads(cli("bench", *TINY, "--json").stdout)["interrupted"]
    found = outcome(done.stdout)
    assert (found["interrupted"], found["bench"]) == (True, "python-6m")
    (header,) = read_lines(tmp_path / found["raw"])
    assert header["kind"] == "header"


ROUND = re.compile(r" *(\d+)  ([a-z+]+) +(\d+) +(\d+) +([\d.]+|-) → (\d+) +([\d.]+|-) → ([\d.]+) +(\S.*)")
HEADING = ["round", "drafter", "drafted", "accepted", "tokens", "ms", "why"]


def rounds_of(lines: list[str]) -> list[tuple[str, ...]]:
    """The cells of a table of rounds."""
    above, heading, *rows = lines
    assert above.strip() == "expected → actual" and heading.split() == HEADING
    found = [ROUND.fullmatch(row) for row in rows]
    assert all(found), rows
    return [each.groups() for each in found if each]


def test_rounds_explained() -> None:
    decisions = [
        None,
        Decision("none", "to measure plain decoding", 1.0, 0.0042),
        Decision("model+ngram", "a reason", 2.57, 1.5, 3),
        Decision("ngram", "told to"),
    ]
    steps = [
        Step(i, (1,) * (i + 1), i, i, i, 0.0, 0.001, 0.002, 0.003, 0.0041, decision)
        for i, decision in enumerate(decisions)
    ]
    assert rounds_of(explain_rounds(steps)) == [
        ("1", "none", "1", "1", "1.0", "2", "4.2", "10.1", "to measure plain decoding"),
        ("2", "model+ngram", "2", "2", "2.6", "3", "1500.0", "10.1", "a reason"),
        ("3", "ngram", "3", "3", "-", "4", "-", "10.1", "told to"),
    ]


def test_explain_prints_a_line_a_round(cli: Cli) -> None:
    options = ("--temperature", "0", "--max-tokens", "24", "--no-memory", "--json", "--threads", "1", "--explain")
    done = cli("run", "import os\nimport sys\nimport ", *options)
    rounds, metrics = rounds_of(done.stderr.splitlines()), json.loads(done.stdout)["metrics"]
    assert [int(each[0]) for each in rounds] == [*range(1, metrics["target_forwards"] + 1)]
    totals = [sum(int(each[column]) for each in rounds) for column in (2, 3, 5)]
    assert totals == [metrics["drafted_tokens"], metrics["accepted_tokens"], metrics["emitted_tokens"] - 1]
    assert [each[8] for each in rounds[:3]] == ["to measure plain decoding"] * 3
    assert {each[1] for each in rounds} <= {"none", "ngram", "model", "ngram+model", "model+ngram"}
