from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.chat import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "conversations.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    store = Store.open(path)
    yield store
    store.close()
