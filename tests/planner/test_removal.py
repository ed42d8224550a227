"""Which files of the cache a load uses."""

from __future__ import annotations

from pathlib import Path

from edgespec.hub.hub import Hub
from edgespec.planner.plan import LoadConfig, list_used_files
from edgespec.registry.schema import load_registry


def test_a_draft_that_was_removed_hides_no_other_file(tmp_path: Path) -> None:
    loaded = LoadConfig(draft="model:hf:me/gone/draft.gguf")
    assert list_used_files(loaded, load_registry(), Hub("http://127.0.0.1:9", tmp_path)) == set()
