"""Markers by folder: `fast` and `contract` make up `make check`; `slow` is the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MARKERS = {
    "fast": ("architecture", "controller", "core", "drafters", "formats", "text"),
    "contract": ("contract",),
    "slow": (
        "api", "backends", "bench", "benchmarks", "cli", "conversations", "engine", "examples", "hub", "laboratory",
        "planner", "registry", "server", "service", "tui",
    ),
}  # fmt: skip
_MARKER = {folder: marker for marker, folders in MARKERS.items() for folder in folders}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(TESTS):
            continue
        folder = item.path.relative_to(TESTS).parts[0]
        if folder.endswith(".py"):
            item.add_marker("fast")
        elif folder not in _MARKER:
            raise pytest.UsageError(f"tests/{folder} has no marker: add it to MARKERS in tests/conftest.py")
        else:
            item.add_marker(_MARKER[folder])
