"""One `runtime` fixture: every test of this folder runs over every runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgespec.core.protocols import CheckCancelled, Session
from tests.contract.runtimes import (
    FIXED_WIDTH,
    LLAMA,
    MLX,
    RANKS,
    SELF_DRAFTS,
    SHARED,
    STREAMS,
    WORKER,
    Runtime,
    fixed_model,
    llama_model,
    mlx_model,
    prefill,
    ranks_model,
    self_drafts,
    toys,
)
from tests.workers import started_worker

SLOTS = {"shared": 8, "streams": 64}
PROMPT_BESIDE = list(range(40, 90))

_TOYS = {runtime.name: runtime for runtime in toys()}


@pytest.fixture(
    scope="session",
    params=[
        *_TOYS,
        *(f"llama.cpp-{name}" for name in LLAMA),
        *(f"shared-{name}" for name in SHARED),
        *(f"streams-{name}" for name in STREAMS),
        *(f"worker-{name}" for name in WORKER),
        *(f"draft {method} on {library}" for library, methods in SELF_DRAFTS.items() for method in methods),
        *(f"mlx-{name}" for name in MLX),
        *(f"ranks-{name}" for name in RANKS),
        *(f"fixed {name} on {library}" for library, names in FIXED_WIDTH.items() for name in names),
    ],
)
def runtime(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    name: str = request.param
    if name in _TOYS:
        yield _TOYS[name]
        return
    if name.startswith("draft "):
        method, library = name.removeprefix("draft ").split(" on ")
        yield Runtime(
            name, self_drafts(library, method, tmp_path_factory.mktemp("draft")), SELF_DRAFTS[library][method]
        )
        return
    if name.startswith("fixed "):
        kind, library = name.removeprefix("fixed ").split(" on ")
        fixed = fixed_model(library, kind, tmp_path_factory.mktemp("fixed"))
        yield Runtime(name, fixed.open_session, (LLAMA if library == "llama.cpp" else MLX)[kind])
        fixed.close()
        return
    library, kind = name.split("-", 1)
    if library in SLOTS:
        model = llama_model(kind, tmp_path_factory.mktemp(library), SLOTS[library])
        model.lends_cells = library == "shared"
        assert model.has_streams == (library == "streams")
        held = model.open_session(shared=True)  # another text, beside which the others are

        def shared(check: CheckCancelled) -> Session:
            return model.open_session(check, shared=True)

        prefill(held, PROMPT_BESIDE)
        yield Runtime(name, shared, (SHARED if library == "shared" else STREAMS)[kind])
        held.close()
        model.close()
        return
    if library == "worker":
        with started_worker() as worker:
            divided = llama_model(kind, tmp_path_factory.mktemp(library), workers=(worker.address,))
            yield Runtime(name, divided.open_session, WORKER[kind])
            divided.close()
        return
    opened, tolerances = {
        "llama.cpp": (llama_model, LLAMA),
        "mlx": (mlx_model, MLX),
        "ranks": (ranks_model, RANKS),
    }[library]
    model = opened(kind, tmp_path_factory.mktemp(library))
    yield Runtime(name, model.open_session, tolerances[kind])
    model.close()
