"""The benchmarks of trained heads run with trained heads."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.conftest import Program, Run
from tests.gguf_models import REPOSITORY, TARGET
from tests.trained_heads import LAYERS, convert, state_layers

HEAD = REPOSITORY / "tests" / "fixtures" / "heads" / "eagle3-python-6m"


def test_heads(program: Program) -> None:
    (found,) = program(
        "benchmarks.heads", "--backend", "mlx", "--target", TARGET, "--head", HEAD, "--category", "code_completion",
        "--prompts", 1, "--tokens", 8, "--ctx", 1024,
    )["heads"]  # fmt: skip
    assert found["head"] == "eagle3" and found["price"]["1"] > 0
    arms = {row["arm"]: row for row in found["code_completion"]}
    assert {row["same"] for row in arms.values()} == {"1/1"}
    assert arms["plain"]["tau"] == 1 < arms["chain 3"]["tau"] and len(arms["chain 3"]["alpha"]) == 3
    assert [row["arm"] for row in found["code_completion at 0.8"]] == ["plain", "sample", "rejection", "block"]


def test_head_vocabulary(program: Program) -> None:
    shape = ("--shape", "30m", "--vocabulary", 8192)
    found = program("laboratory.head_vocabulary", *shape, "--head", "mtp", "--prompts", 1, "--tokens", 8)
    assert found["price"]["draft_ms"] > 0 and found["price"]["forward_ms"] > 0
    rates = found["acceptance"]["mtp"]
    assert rates["tau"] >= rates["short_tau"] >= 1 and rates["tau_same"] == rates["short_tau_same"] == 1


def test_a_file_without_a_head(run_module: Run) -> None:
    done = run_module("benchmarks.heads", "--target", TARGET, "--head", TARGET)
    assert done.returncode == 1 and "holds no trained head" in done.stderr and "Traceback" not in done.stderr


def test_a_head_among_lookups(program: Program, tmp_path: Path) -> None:
    head = convert(state_layers(tmp_path / "head", LAYERS))
    sizes = ("--prompts", 1, "--tokens", 8, "--repeats", 1, "--exact", "--curve", "9:1=1,64=1", "--unit", 0.1)
    result = program("benchmarks.lookups", "--draft", head, "--arm", "ngram+eagle3", "--arm", "eagle3:2/6", *sizes)
    assert [arm["arm"] for arm in result["arms"]] == ["plain", "ngram+eagle3", "eagle3:2/6"]
    assert all(arm["tau"] > 1 and arm["same"] == 1 for arm in result["arms"][1:])
