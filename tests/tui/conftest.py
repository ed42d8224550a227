"""Folders of their own for every test, and short queues."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tui.screens import script  # noqa: F401 - a fixture of several files


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers run ahead of the screen by little, so that those without an end leave time for the test."""
    monkeypatch.setattr("edgespec.service.stream.MAX_UNREAD", 32)


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where conversations are kept; caches and configuration are beside it, and nothing is fetched."""
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"EDGESPEC_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "data"
