"""One `runtime` fixture: every test of this folder runs over every runtime that is installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.contract.toys import Runtime, toys

HAS_RUNTIMES = find_spec("llama_cpp") is not None and find_spec("mlx") is not None
if HAS_RUNTIMES:
    from tests.contract import runtimes
else:  # tests of a first patch, see CONTRIBUTING.md
    collect_ignore = ["test_drafters.py", "test_drafter_mutants.py", "test_drafter_rules.py", "test_rollouts.py"]

_TOYS = {runtime.name: runtime for runtime in toys()}


@pytest.fixture(scope="session", params=[*_TOYS, *(runtimes.NAMES if HAS_RUNTIMES else ())])
def runtime(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    name: str = request.param
    if name in _TOYS:
        yield _TOYS[name]
    else:
        yield from runtimes.opened(name, tmp_path_factory.mktemp)
