"""Stored runtime settings: found under the same options alone, and a damaged file only costs a measurement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.autopilot.settings_store import SettingsStore
from edgespec.backends.options import LoadOptions
from edgespec.backends.settings import RuntimeSettings
from edgespec.errors import CacheError

OPTIONS = LoadOptions(threads=2, context_size=8192)
SETTINGS = RuntimeSettings(False, None, 1, {3000: 1.3, 100: 0.9}, {1: 0.97, 4: 1.08})
LINES = [
    "flash attention off: 0.90x at 100 tokens, 1.30x at 3,000 tokens",
    "threads all idle cores for one row, 1 for more; fewer: 0.97x for 1 row, 1.08x for 4 rows",
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def store(tmp_path: Path) -> SettingsStore:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"weights")
    return SettingsStore(model)


def test_saved_settings_are_loaded_under_the_same_options(store: SettingsStore) -> None:
    assert store.load("llamacpp", OPTIONS) is None
    store.save("llamacpp", OPTIONS, SETTINGS)
    assert store.load("llamacpp", OPTIONS) == SETTINGS
    assert store.load("llamacpp", replace(OPTIONS, context_size=16384)) == SETTINGS, "measured at the same lengths"
    for other in (
        replace(OPTIONS, context_size=2048),
        replace(OPTIONS, threads=1),
        replace(OPTIONS, batch_threads=1),
        replace(OPTIONS, gpu_layers=0),
        replace(OPTIONS, flash_attention=True),
    ):
        assert store.load("llamacpp", other) is None
        store.save("llamacpp", other, RuntimeSettings())
    assert store.load("llamacpp", OPTIONS) == SETTINGS


def test_settings_are_described() -> None:
    assert SETTINGS.describe() == LINES
    kept = RuntimeSettings(without_flash={700: 0.98})
    assert kept.describe() == ["flash attention as llama.cpp decides; off: 0.98x at 700 tokens"]
    assert RuntimeSettings().describe() == []


@pytest.mark.parametrize(
    "change",
    [
        {"flash_attention": 3},
        {"threads": 0},
        {"batch_threads": 10**6},
        {"without_flash": None},
        {"without_flash": {"700": 0}},
        {"with_fewer_threads": {"1": -1}},
    ],
    ids=str,
)
def test_a_damaged_entry_is_as_none_and_written_over(store: SettingsStore, change: dict[str, Any]) -> None:
    store.save("llamacpp", OPTIONS, SETTINGS)
    (entry,) = json.loads(store.path.read_text())["entries"]
    damaged = entry | {"chosen": entry["chosen"] | change}
    store.path.write_text(json.dumps({"entries": [damaged]}))
    assert store.load("llamacpp", OPTIONS) is None
    store.save("llamacpp", OPTIONS, SETTINGS)
    assert store.load("llamacpp", OPTIONS) == SETTINGS


@pytest.mark.parametrize("text", ["", "[]", '{"entries": 3}', '{"entries": [{"setting": {}}]}', "\0"])
def test_a_damaged_file_is_empty(store: SettingsStore, text: str) -> None:
    store.save("llamacpp", OPTIONS, SETTINGS)
    store.path.write_text(text)
    assert store.load("llamacpp", OPTIONS) is None


def test_a_model_that_cannot_be_read_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"gone\.gguf cannot be read"):
        SettingsStore(tmp_path / "gone.gguf").load("llamacpp", OPTIONS)
