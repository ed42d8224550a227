"""Servers that the tests of a worker share: the embedded pair, and the toy, which is fast and can go on without end."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.server.serving import EMBEDDED, SMALL, TOY, Server, serving

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it is downloaded on import


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("pair"), *EMBEDDED) as server:
        yield server


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The toy with a short context, which keeps every answer short."""
    with serving(tmp_path_factory.mktemp("small"), *SMALL) as server:
        yield server


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("toy"), *TOY) as server:
        yield server
