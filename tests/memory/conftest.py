"""A memory in a folder of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.memory.administration import TextStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "memory"


@pytest.fixture
def store(folder: Path) -> Iterator[TextStore]:
    store = TextStore.open(folder)
    yield store
    store.close()
