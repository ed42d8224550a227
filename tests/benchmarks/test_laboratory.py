"""The programs of the laboratory run on small models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec.formats.head_file import read_head
from tests.benchmarks.conftest import Program
from tests.models import DRAFT, REPOSITORY, TARGET

HEADS = REPOSITORY / "tests" / "fixtures" / "heads"

pytestmark = pytest.mark.slow


def test_mlx_window(program: Program) -> None:
    (row,) = program("laboratory.mlx_window", "--tokens", 8, "--models", 1)["first_difference"]
    assert row == {"prompt": 19, "edgespec": None, "mlx_lm": row["mlx_lm"]}


def test_plan_names(program: Program) -> None:
    plan = program("laboratory.plan_names", "llama-8b-q4", "--no-speed")["names"]["llama-8b-q4"]
    assert plan["needed_bytes"] > 6e9 and isinstance(plan["fits"], bool)
    (traffic,) = plan["hub"].values()
    assert traffic["header"] <= traffic["asked"] and 0 < traffic["sent"] <= traffic["asked"]


def test_cost_faithful(program: Program, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    result = program("laboratory.cost_faithful", "30m", out, "--source", DRAFT, "--check")
    assert result["bytes"] == out.stat().st_size > 1e6
    assert result["quantized"]["faults"] == 0 and result["exact"]["equal"] > result["exact"]["tokens"] / 2


def check_head(result: dict[str, Any], out: Path, kind: str, layers: tuple[int, ...], draft_vocab_size: int) -> None:
    assert result["bytes"] == out.stat().st_size
    head = read_head(out)
    assert head is not None and (head.kind, head.layers, head.draft_vocab_size) == (kind, layers, draft_vocab_size)


def test_eagle3_gguf(program: Program, tmp_path: Path) -> None:
    out = tmp_path / "head.gguf"
    check_head(
        program("laboratory.eagle3_gguf", HEADS / "eagle3-python-6m", TARGET, out), out, "eagle3", (1, 3, 5), 2048
    )


def test_dflash_gguf(program: Program, tmp_path: Path) -> None:
    out = tmp_path / "head.gguf"
    check_head(
        program("laboratory.dflash_gguf", HEADS / "dflash-python-6m", TARGET, out), out, "dflash", (1, 3, 5), 4096
    )


def test_mtp_gguf(program: Program, tmp_path: Path) -> None:
    out = tmp_path / "model.gguf"
    check_head(program("laboratory.mtp_gguf", HEADS / "mtp-python-6m", TARGET, out), out, "mtp", (), 4096)
