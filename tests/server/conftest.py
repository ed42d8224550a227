"""Servers shared by the tests of a file: the embedded pair, and the toy, which is fast and can generate without end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.serving import EMBEDDED, SMALL, TOY, Server, serving


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("pair"), *EMBEDDED) as server:
        yield server


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The toy with a short context, which keeps every answer short."""
    with serving(tmp_path_factory.mktemp("small"), *SMALL) as server:
        yield server


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("toy"), *TOY) as server:
        yield server
