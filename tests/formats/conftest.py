"""Fixtures: a hub served from a temporary folder, a client with a cache of its own, a folder for drawn files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hub.fixtures import gguf_path, hub, root, server

__all__ = ["gguf_path", "hub", "root", "scratch", "server"]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all examples of a property use."""
    return tmp_path_factory.mktemp("scratch")
