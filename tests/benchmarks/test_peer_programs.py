"""The comparisons with mlx_lm run on random MLX models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.conftest import Program
from tests.mlx_models import DENSE, make_folder


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
    arms = {"edgespec plain", "edgespec auto", "edgespec model", "mlx_lm plain", "mlx_lm draft"}
    (group,) = result["groups"]
    assert {row["arm"] for row in group["rows"]} == arms and all(row["answers"] == 1 for row in group["rows"])
