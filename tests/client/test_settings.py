"""Runtime settings are measured at a model's first load and used from then on, unless the user has set them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.backends.llamacpp import settings as tuning
from edgespec.backends.llamacpp.model import LlamaModel
from edgespec.backends.options import LoadOptions
from edgespec.backends.settings import RuntimeSettings
from edgespec.engine.loaded_model import LoadedModel
from edgespec.engine.open import Loader
from edgespec.models.load_config import LoadConfig

CONFIG = LoadConfig(load=LoadOptions(threads=1, context_size=1024), draft_max=3)
FOUND = RuntimeSettings(flash_attention=False, without_flash={440: 1.3, 100: 0.9})
Open = Callable[..., LoadedModel]


@pytest.fixture(autouse=True)
def own_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("EDGESPEC_CACHE_DIR", "EDGESPEC_CONFIG_DIR", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of every measurement asked for, all of which find the same."""
    asked: list[float] = []

    def measure(model: LlamaModel, seconds: float) -> RuntimeSettings | None:
        asked.append(seconds)
        return FOUND if model.options.flash_attention is None else None

    monkeypatch.setattr(LlamaModel, "measure_settings", measure)
    return asked


@pytest.fixture
def open_() -> Iterator[Open]:
    with ExitStack() as closing:

        def opening(config: LoadConfig, settings_s: float | None = None) -> LoadedModel:
            loaded = Loader(settings_s).load(config)
            closing.callback(loaded.engine.close)
            return loaded

        yield opening


def options_of(loaded: LoadedModel) -> list[LoadOptions]:
    """Of the target and its draft models."""
    sources = [loaded.engine.target, *(each.source for each in loaded.engine.drafters.values())]
    return [source.options for source in sources if isinstance(source, LlamaModel)]


def test_measured_once_and_used_by_target_and_draft(open_: Open, measured: list[float]) -> None:
    for _ in range(2):
        loaded = open_(CONFIG)
        assert loaded.settings == FOUND
        assert [each.flash_attention for each in options_of(loaded)] == [False, False]
        assert loaded.info.settings is not None
        assert loaded.info.settings.chosen == {"flash_attention": False, "threads": 1, "batch_threads": None}
        assert loaded.key["flash_attention"] is False, "costs are stored under what they were measured with"
    assert measured == [0.4]
    assert open_(CONFIG, 7.0).settings == FOUND
    assert measured == [0.4, 7.0], "tune measures again"
    open_(replace(CONFIG, draft="none"))
    assert len(measured) == 2, "the draft does not matter"
    open_(replace(CONFIG, load=LoadOptions(threads=2, context_size=1024)))
    assert len(measured) == 3


def test_a_model_that_was_too_slow_to_measure_keeps_its_settings(open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy at the first load only would else give the model another rounding at the second."""
    with monkeypatch.context() as busy:
        busy.setattr(tuning, "_MAX_STEP_S", 0.0)
        busy.setattr("edgespec.engine.runtime_settings._SETTINGS_S", 1e-6)
        assert open_(CONFIG).settings == RuntimeSettings()
    assert open_(CONFIG).settings == RuntimeSettings()
    assert open_(CONFIG, 0.4).settings != RuntimeSettings(), "until it is measured again"
