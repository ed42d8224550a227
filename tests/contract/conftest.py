"""One `runtime` fixture: every test of this folder runs over every runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.runtimes import LLAMA, Runtime, llama_model, toys

_TOYS = {runtime.name: runtime for runtime in toys()}


@pytest.fixture(scope="session", params=[*_TOYS, *(f"llama.cpp-{name}" for name in LLAMA)])
def runtime(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    name: str = request.param
    if name in _TOYS:
        yield _TOYS[name]
        return
    kind = name.removeprefix("llama.cpp-")
    model = llama_model(kind, tmp_path_factory.mktemp("gguf"))
    yield Runtime(name, model.open_session, LLAMA[kind])
    model.close()
