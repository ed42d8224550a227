"""From a request to an open engine that knows what was measured and learned of the embedded pair before."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from edgespec.backends.options import LoadOptions
from edgespec.controller.cost_model import Profile
from edgespec.controller.stats import DraftStats
from edgespec.controller.store import ProfileStore
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Request
from edgespec.planner.plan import LoadConfig
from edgespec.service.load import LoadedModel, Loader
from tests.engine.conftest import generate
from tests.models import DRAFT, TARGET

ONE = LoadOptions(threads=1, context_size=128)
Open = Callable[[LoadConfig], LoadedModel]


class Heard:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def download(self, name: str, done: int, total: int) -> None: ...

    def loading(self, name: str, fraction: float) -> None: ...


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """Seconds of every measurement asked for, none of which is made; caches and configuration are the test's own."""
    for name in ("EDGESPEC_CACHE_DIR", "EDGESPEC_CONFIG_DIR", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked: list[float] = []

    def measure(engine: Engine, seconds: float, check: object = None) -> Profile:
        asked.append(seconds)
        return Profile({1: 0.01, 4: 0.011}, 0.001, 0.0001) if engine.draft else Profile({1: 0.01, 4: 0.012})

    monkeypatch.setattr(Engine, "measure", measure)
    return asked


@pytest.fixture
def open_(measured: list[float], heard: Heard) -> Iterator[Open]:
    with ExitStack() as closing:

        def opening(request: LoadConfig) -> LoadedModel:
            loaded = Loader(heard, lambda: None).load(request)
            closing.callback(loaded.engine.close)
            return loaded

        yield opening


def changed(loaded: LoadedModel, request: LoadConfig, heard: Heard) -> LoadedModel:
    return Loader(heard, lambda: None).change_draft(loaded, request)


def converse(loaded: LoadedModel) -> dict[str, object]:
    """What the autopilot knows after an answer."""
    generate(loaded.engine, Request("import os\nimport ", SamplingParams(temperature=0), max_tokens=20))
    return loaded.engine.draft_stats.to_dict()


def test_measured_once_then_loaded_with_what_was_learned(open_: Open, measured: list[float], heard: Heard) -> None:
    first = open_(LoadConfig(load=ONE))
    known = converse(first)
    first.save_stats()
    assert measured == [2.0]
    second = open_(LoadConfig(load=ONE))
    assert second.engine.draft_stats.to_dict() == known
    assert known["models"] and known["matches"]
    assert (measured, heard.notices) == ([2.0], [])


def test_another_setting_is_measured_and_said(open_: Open, measured: list[float], heard: Heard) -> None:
    open_(LoadConfig(load=ONE)).save_stats()
    two = open_(LoadConfig(load=LoadOptions(threads=2, context_size=128)))
    assert (len(measured), heard.notices) == (
        2,
        ["Measured before with other settings (threads: 2, was 1); measuring again."],
    )
    two.save_stats()
    open_(LoadConfig(load=LoadOptions(threads=2, context_size=64)))
    open_(LoadConfig(load=ONE))
    assert len(measured) == 2, "both are known, and the context's size does not matter"


def test_drafts_are_known_apart(open_: Open, measured: list[float], heard: Heard) -> None:
    open_(LoadConfig(load=ONE)).save_stats()
    lookups = open_(LoadConfig(load=ONE, draft="ngram"))
    assert (len(measured), heard.notices) == (2, [])
    assert lookups.engine.draft_stats.costs.profile.draft_s is None
    lookups.save_stats()
    assert open_(LoadConfig(load=ONE)).engine.draft_stats.costs.profile.draft_s == 0.001


@pytest.mark.parametrize("request_", [LoadConfig(load=ONE, draft="none"), LoadConfig(load=ONE, draft_max=3)])
def test_nothing_is_measured_for_plain_decoding_and_fixed_lengths(
    open_: Open, measured: list[float], request_: LoadConfig
) -> None:
    loaded = open_(request_)
    assert not measured and not loaded.engine.has_draft_stats
    loaded.save_stats()
    assert not ProfileStore(loaded.target_path, loaded.draft_path).path.exists()


def test_a_fixed_length_does_not_forget_what_is_known(open_: Open, measured: list[float]) -> None:
    """A chat may begin with --gamma and leave it to the autopilot later."""
    first = open_(LoadConfig(load=ONE))
    known = converse(first)
    first.save_stats()
    assert open_(LoadConfig(load=ONE, draft_max=3)).engine.draft_stats.to_dict() == known
    assert measured == [2.0]


def test_another_draft_and_back(open_: Open, measured: list[float], heard: Heard) -> None:
    loaded = open_(LoadConfig(load=ONE))
    known = converse(loaded)
    lookups = changed(loaded, LoadConfig(load=ONE, draft="ngram"), heard)
    assert (lookups.info.draft, lookups.draft_path, len(measured)) == ("ngram", None, 2)
    back = changed(lookups, LoadConfig(load=ONE, draft="model"), heard)
    assert (back.engine.draft_stats.to_dict(), len(measured)) == (known, 2)
    back.engine.release_draft()


def test_the_same_draft_again_keeps_what_was_learned(open_: Open, heard: Heard) -> None:
    loaded = open_(LoadConfig(load=ONE))
    loaded.save_stats()
    known = converse(loaded)
    again = changed(loaded, LoadConfig(load=ONE, draft="model"), heard)
    assert again.engine.draft_stats.to_dict() == known
    again.engine.release_draft()


def test_files_that_have_gone_meanwhile_cost_no_answer(open_: Open, tmp_path: Path) -> None:
    target, draft = (Path(shutil.copy(path, tmp_path)) for path in (TARGET, DRAFT))
    loaded = open_(LoadConfig(load=ONE, model=str(target), draft=str(draft)))
    draft.unlink()
    loaded.save_stats()


def test_a_damaged_file_is_measured_again_and_healed(open_: Open, measured: list[float], heard: Heard) -> None:
    loaded = open_(LoadConfig(load=ONE))
    store = ProfileStore(loaded.target_path, loaded.draft_path)
    store.path.parent.mkdir(parents=True)
    store.path.write_text('{"entries": [{"setting": {}, "experience": NaN}]}')
    open_(LoadConfig(load=ONE)).save_stats()
    assert (len(measured), heard.notices) == (2, [])
    assert isinstance(store.load(loaded.key), DraftStats)


def test_the_toy_runtime_keeps_nothing(
    open_: Open, measured: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tree").write_text("a file that happens to be called like a toy")
    loaded = open_(LoadConfig(backend="toy"))
    converse(loaded)
    loaded.save_stats()
    assert measured == [0.5]
    assert not (tmp_path / "EDGESPEC_CACHE_DIR").exists()
