"""Fixtures: a hub served from a temporary folder, and a client with a cache of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.models.hub import Hub
from tests.models.hubserver import HubServer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder that the hub serves."""
    folder = tmp_path / "served"
    folder.mkdir()
    return folder


@pytest.fixture
def server(root: Path) -> Iterator[HubServer]:
    with HubServer(root, token="hf_right") as running:
        yield running


@pytest.fixture
def hub(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A client of `server` with an empty cache; the token of the machine is kept out."""
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return Hub(server.url, tmp_path / "hub-cache")
