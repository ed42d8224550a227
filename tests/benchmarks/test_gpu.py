"""benchmarks.gpu on the embedded pair and whatever device there is; what is cut, fails or finds no time."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.gpu import Report, main
from benchmarks.gpu_steps import STEPS, Setting, Step
from tests.benchmarks.conftest import Program
from tests.gguf_models import TARGET


def test_gpu(program: Program, tmp_path: Path) -> None:
    steps = [word for name in ("small", "host", "together") for word in ("--only", name)]
    sizes = ("--large", "own", "--small", "own", "--tokens", 48, "--threads", 1)
    results = tmp_path / "results"
    found = program(
        "benchmarks.gpu", results, "--model", TARGET, "--llama-server", "none", *sizes, "--minutes", 20, *steps
    )
    assert [each["step"] for each in found["outcomes"]] == [*["models"] * 4, "host", "small", "together"]
    assert all(each["exit"] == 0 for each in found["outcomes"])
    kept = json.loads((results / "gpu.json").read_text(encoding="utf-8"))
    assert kept["outcomes"] == found["outcomes"] and kept["minutes"] == 20
    arms = {row["arm"].split("/")[0] for row in found["outcomes"][-2]["result"]["groups"][0]["rows"]}
    assert {"edgespec plain", "edgespec auto", "edgespec model", "edgespec ngram"} < arms and len(arms) == 5
    assert "$ python -m benchmarks.parallel" in (results / "gpu.log").read_text(encoding="utf-8")


def test_what_is_cut_what_fails_and_what_finds_no_time(tmp_path: Path) -> None:
    report = Report(tmp_path, 40, TARGET)
    report.run(Step("both", 0.3, (("benchmarks.nowhere",), ("http.server", "--bind", "127.0.0.1", "0"))))
    report.run(Step("late", 2.0, (("benchmarks.nowhere",),)))
    failed, cut, late = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["outcomes"]
    assert failed["exit"] == 1 and cut["exit"] == "cut"
    assert late["step"] == "late" and late["left_out"].endswith("up to 80")
    assert "No module named benchmarks.nowhere" in (tmp_path / "gpu.log").read_text(encoding="utf-8")


def test_a_folder_with_other_results_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real.jsonl").write_text("{}\n")
    refused = CliRunner().invoke(main, [str(tmp_path), "--model", str(TARGET)])
    assert refused.exit_code == 2 and "has files of another run: name a new folder" in " ".join(refused.output.split())


def test_every_step_can_be_named(tmp_path: Path) -> None:
    setting = Setting(tmp_path, tmp_path, TARGET, None, "none", "own", "own", 8, 1, 64, 1)
    assert tuple(each.name for each in setting.list_steps()) == STEPS
