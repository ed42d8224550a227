"""A model that a request has loaded answers at once, and is measured when nobody waits."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from edgespec.autopilot.profile import Profile
from edgespec.autopilot.settings_store import SettingsStore
from edgespec.backends.options import LoadOptions
from edgespec.client import local
from edgespec.client.local import LocalEngine
from edgespec.core.protocols import PrefillProgress, Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.activity import is_any_engine_working
from edgespec.engine.engine import Engine
from edgespec.engine.events import Event, Request
from edgespec.engine.open import Loader
from edgespec.errors import BackendError
from edgespec.models.load_config import LoadConfig
from tests.gguf_models import TARGET
from tests.reporter import Heard

CONFIG = LoadConfig(str(TARGET), draft="ngram", load=LoadOptions(threads=1, context_size=1024))
REQUEST = Request("x = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2,", SamplingParams(temperature=0), 48)


@pytest.fixture
def engine(folders: None) -> Iterator[LocalEngine]:
    made = LocalEngine(uses_idle_time=True)
    yield made
    made.close()


def answer(engine: LocalEngine) -> list[Event]:
    return list(engine.stream(REQUEST))


def first_tokens(events: list[Event]) -> tuple[int, ...]:
    return next(event.tokens for event in events if isinstance(event, Step))


def await_measurements(engine: LocalEngine) -> None:
    until = time.monotonic() + 60
    assert engine.loaded is not None
    while engine.loaded.pending.costs or engine.loaded.pending.settings:
        assert time.monotonic() < until, "nothing was measured"
        time.sleep(0.1)


def test_the_first_answer_waits_for_no_measurement(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("measured while a request waits")

    with monkeypatch.context() as context:
        context.setattr("edgespec.engine.engine.Engine.measure", refuse)
        context.setattr("edgespec.backends.llamacpp.model.LlamaModel.measure_settings", refuse)
        engine.open(CONFIG, Heard(), measures_later=True).result()
        first = answer(engine)
    steps = [event for event in first if isinstance(event, Step)]
    assert sum(step.n_accepted for step in steps) > 0, "it drafts with what is assumed"
    assert engine.draft_stats().result() is None
    assert engine.model_info is not None and engine.model_info.plain_speed is None, "an assumed speed is not shown"


def test_it_is_measured_in_idle_time(engine: LocalEngine) -> None:
    """The text in the cache stays, and the settings are those of the next load."""
    engine.open(CONFIG, Heard(), measures_later=True).result()
    first = answer(engine)
    await_measurements(engine)
    again = answer(engine)
    assert max(event.reused for event in again if isinstance(event, PrefillProgress)) > 10
    assert first_tokens(again) == first_tokens(first)
    loaded = engine.loaded
    assert loaded is not None and loaded.plan is not None and loaded.settings is None
    engine.close()
    assert SettingsStore(TARGET).load("llamacpp", loaded.plan.options) is not None
    next_load = Loader(measures_later=True).load(CONFIG)
    assert not next_load.pending.settings
    next_load.engine.close()


def test_trainings_wait_while_it_is_measured(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, measure = [], Engine.measure

    def watch(self: Engine, seconds: float) -> Profile:
        seen.append(is_any_engine_working())
        return measure(self, seconds)

    monkeypatch.setattr(Engine, "measure", watch)
    engine.open(CONFIG, Heard(), measures_later=True).result()
    answer(engine)
    await_measurements(engine)
    assert seen and all(seen)
    until = time.monotonic() + 10
    while is_any_engine_working():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_measurement_that_fails_leaves_no_assumed_costs_behind(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer fails for it, and the next load has nothing stored."""

    def fail(*_: object) -> None:
        raise BackendError("no memory")

    engine.open(CONFIG, Heard(), measures_later=True).result()
    with monkeypatch.context() as context:
        context.setattr("edgespec.engine.engine.Engine.measure", fail)
        answer(engine)
        loaded = engine.loaded
        assert loaded is not None
        until = time.monotonic() + 60
        while not loaded.pending.has_failed:
            assert time.monotonic() < until
            time.sleep(0.1)
        answer(engine)
    assert not loaded.has_costs
    engine.close()
    next_load = Loader(measures_later=True).load(CONFIG)
    assert next_load.pending.costs
    next_load.engine.close()


def test_it_is_measured_between_answers_if_there_is_no_idle_time(
    folders: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LocalEngine()
    engine.open(CONFIG, Heard(), measures_later=True).result()
    for _ in range(local._MOST_UNMEASURED):
        assert engine.draft_stats().result() is None
        answer(engine)
    answer(engine)
    assert engine.draft_stats().result() is not None
    engine.close()
