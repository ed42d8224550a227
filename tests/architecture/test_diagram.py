"""docs/architecture.svg, which docs/architecture_diagram.py draws from the imports."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from tests.gguf_models import REPOSITORY

SCRIPT = REPOSITORY / "docs" / "architecture_diagram.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_the_picture_has_every_package(script: dict[str, Any]) -> None:
    layers = script["read_layers"]()
    drawn = script["draw"](layers, script["read_imports"]())
    names = {name for layer in layers for name in layer}
    for picture in (drawn, script["OUTPUT"].read_text(encoding="utf-8")):
        assert {name for name in names if f">{name}<" not in picture} == set()


def test_the_reduction_keeps_what_can_be_reached(script: dict[str, Any]) -> None:
    graph = {"a": {"b", "c", "d"}, "b": {"c"}, "c": set(), "d": set()}
    assert script["reduce"](graph) == {"a": {"b", "d"}, "b": {"c"}, "c": set(), "d": set()}
