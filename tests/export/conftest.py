"""Plans of pairs that are not on this machine, by the shipped registry."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.export.gather import gather
from edgespec.export.plan import ExportPlan
from edgespec.models.hub import Hub
from edgespec.models.load_config import LoadConfig, MemoryOptions
from edgespec.models.registry import Registry, load_registry

Gather = Callable[..., ExportPlan]
KEYS = Path(__file__).parent / "keys"


def read_keys(engine: str) -> dict[str, Any]:
    return json.loads((KEYS / f"{engine}.json").read_text(encoding="utf-8"))


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return load_registry(tmp_path / "none.toml")


@pytest.fixture
def plan(tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Gather:
    """Gather a model; no request can be sent."""
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))
    hub = Hub("http://127.0.0.1:9", tmp_path / "hub", offline=True)

    def run(
        model: str | None, draft: str = "auto", backend: Any = "llamacpp", target_id: str | None = None,
        draft_id: str | None = None,
    ) -> ExportPlan:  # fmt: skip
        memory = MemoryOptions(tmp_path / "memory")
        request = LoadConfig(model, backend, draft, memory=memory, adapted=tmp_path / "adapted")
        return gather(request, registry, hub, target_id, draft_id)

    return run
