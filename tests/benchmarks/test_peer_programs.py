"""The comparisons with other programs run on random MLX models, and with llama-server where it is installed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.benchmarks.conftest import Program, Run
from tests.mlx_models import DENSE, make_folder
from tests.models import DRAFT, TARGET

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def mlx_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two model folders with random weights."""
    folder = tmp_path_factory.mktemp("mlx")
    return make_folder(folder / "target", DENSE), make_folder(folder / "draft", DENSE, seed=1)


def test_mlx_peer(program: Program, mlx_pair: tuple[Path, Path]) -> None:
    result = program("benchmarks.mlx_peer", *mlx_pair, "--tokens", 16, "--prompts", 1, "--draft-max", 2)
    assert set(result["equal_to_mlx_lm_plain"]) == {"plain", "chain", "tree", "ngram", "autopilot", "peer chain"}
    assert set(result["tokens_per_round_at_temperature_1"]) == {"mlx_lm, match", "sample", "rejection", "block"}
    assert all(tokens >= 1 for tokens in result["tokens_per_round_at_temperature_1"].values())


def test_peers_of_mlx(program: Program, mlx_pair: tuple[Path, Path]) -> None:
    target, draft = mlx_pair
    selection = ("--category", "code_completion", "--per-category", 1, "--tokens", 8, "--repeats", 1)
    result = program("benchmarks.peers", "--target", target, "--draft", draft, *selection)
    assert set(result["arms"]) == {"edgespec plain", "edgespec autopilot", "mlx_lm plain", "mlx_lm draft"}
    assert len(result["runs"]) == 4 and all(run["emitted"] >= 1 for run in result["runs"])


def test_peers_of_llamacpp(run_module: Run) -> None:
    """With llama-server it compares; without, it names what is missing in one sentence."""
    selection = ("--category", "code_completion", "--per-category", 1, "--tokens", 8, "--repeats", 1, "--only", "draft")
    done = run_module("benchmarks.peers", "--target", TARGET, "--draft", DRAFT, *selection)
    if shutil.which("llama-server"):
        assert "llama-server plain" in json.loads(done.stdout)["arms"], done.stderr
    else:
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.startswith("Error: llama-server was not found: ") and done.stderr.count("\n") == 1
