"""A folder for files that properties draw."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all examples of a property use."""
    return tmp_path_factory.mktemp("scratch")
