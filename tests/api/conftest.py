"""The embedded pair, loaded once, with folders of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import edgespec


@pytest.fixture(scope="session", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Cache, configuration and data of this session alone, and no network."""
    folder = tmp_path_factory.mktemp("edgespec")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CACHE", "CONFIG", "DATA"):
            patch.setenv(f"EDGESPEC_{name}_DIR", str(folder / name.lower()))
        patch.setenv("HF_HOME", str(folder / "hf"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield folder


@pytest.fixture(scope="session")
def model(folders: Path) -> Iterator[edgespec.Model]:
    """`exact`, so that drafts cannot change a text by rounding."""
    with edgespec.load(threads=1, draft="ngram", draft_max=4, exact=True, ctx=1024, parallel=2) as loaded:
        yield loaded
