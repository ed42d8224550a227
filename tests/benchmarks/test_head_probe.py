"""The benchmark of the probe runs on the trained head."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.conftest import Program
from tests.models import TARGET
from tests.trained_heads import LAYERS, convert, state_layers

pytestmark = pytest.mark.slow


def test_head_probe(program: Program, tmp_path: Path) -> None:
    head = convert(state_layers(tmp_path / "head", LAYERS))
    rows = program("benchmarks.head_probe", TARGET, head)["probes"]
    assert [row["stated"] for row in rows] == ["layers 1, 3, 5", "layers 2, 4, 6", "layers 0, 2, 4"]
    for row in rows:
        assert row["right"] and row["found"] == "layers 1, 3, 5" and row["seconds"] > 0
        assert row["agreement"][0] > 0.4 > 0.2 > row["lookups"]
    assert [row["stated_agreement"] is None for row in rows] == [False, True, False]
