"""Folders of their own for every test, and short queues."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual._wait import wait_for_idle

from tests.chat.tui.screens import script  # noqa: F401 - a fixture of several files


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers run ahead of the screen by little, so that those without an end leave time for the test."""
    monkeypatch.setattr("edgespec.client.stream.MAX_UNREAD", 32)


@pytest.fixture(autouse=True)
def tireless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that do not end by themselves repeat themselves."""
    monkeypatch.setattr("edgespec.chat.state.ENDLESS", None)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a key, wait for an idle process for 0.1 s at most: while an answer comes it is never idle."""

    async def wait(min_sleep: float) -> None:
        await wait_for_idle(min_sleep, max_sleep=0.1)

    for module in ("app", "pilot"):
        monkeypatch.setattr(f"textual.{module}.wait_for_idle", wait)


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where conversations are kept; caches and configuration are beside it, and nothing is fetched."""
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"EDGESPEC_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "data"
