"""docs/architecture.svg shows the imports as they are."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.gguf_models import REPOSITORY

SCRIPT = REPOSITORY / "docs" / "architecture_diagram.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_the_diagram_is_current(script: dict[str, Any]) -> None:
    drawn = script["draw"](script["read_layers"](), script["read_imports"]())
    path: Path = script["OUTPUT"]
    assert path.read_text(encoding="utf-8") == drawn, f"run `uv run python {SCRIPT.relative_to(REPOSITORY)}`"


def test_the_reduction_keeps_what_can_be_reached(script: dict[str, Any]) -> None:
    graph = {"a": {"b", "c", "d"}, "b": {"c"}, "c": set(), "d": set()}
    assert script["reduce"](graph) == {"a": {"b", "d"}, "b": {"c"}, "c": set(), "d": set()}
