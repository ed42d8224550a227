"""Fixtures of the tests of EngineClients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.client.process import EngineProcess


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"EDGESPEC_{name}_DIR", str(tmp_path / name.lower()))


@pytest.fixture
def apart() -> Iterator[EngineProcess]:
    made = EngineProcess()
    yield made
    made.close()
