"""From a request to an open engine that knows what was measured and learned of the embedded pair before."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from edgespec.backends.options import LoadOptions
from edgespec.controller.cost_model import Profile
from edgespec.controller.stats import Experience
from edgespec.controller.store import Store
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Request
from edgespec.hub.hub import Hub
from edgespec.planner.plan import OpenRequest
from edgespec.registry.schema import load_registry
from edgespec.service.load import Opened, change_draft, open_engine
from tests.engine.conftest import generate
from tests.models import DRAFT, TARGET

ONE = LoadOptions(threads=1, context_size=128)
Open = Callable[[OpenRequest], Opened]


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

        def opening(request: OpenRequest) -> Opened:
            opened = open_engine(request, load_registry(), Hub.from_environment(), heard, lambda: None)
            closing.callback(opened.engine.close)
            return opened

        yield opening


def changed(opened: Opened, request: OpenRequest, heard: Heard) -> Opened:
    return change_draft(opened, request, load_registry(), Hub.from_environment(), heard, lambda: None)


def converse(opened: Opened) -> dict[str, object]:
    """What the autopilot knows after an answer."""
    generate(opened.engine, Request("import os\nimport ", SamplingParams(temperature=0), max_tokens=20))
    return opened.engine.experience.to_dict()


def test_measured_once_then_loaded_with_what_was_learned(open_: Open, measured: list[float], heard: Heard) -> None:
    first = open_(OpenRequest(load=ONE))
    known = converse(first)
    first.keep()
    assert measured == [2.0]
    second = open_(OpenRequest(load=ONE))
    assert second.engine.experience.to_dict() == known
    assert known["models"] and known["matches"]
    assert (measured, heard.notices) == ([2.0], [])


def test_another_setting_is_measured_and_said(open_: Open, measured: list[float], heard: Heard) -> None:
    open_(OpenRequest(load=ONE)).keep()
    two = open_(OpenRequest(load=LoadOptions(threads=2, context_size=128)))
    assert (len(measured), heard.notices) == (2, ["Measured before with threads 1 instead of 2; measuring again."])
    two.keep()
    open_(OpenRequest(load=LoadOptions(threads=2, context_size=64)))
    open_(OpenRequest(load=ONE))
    assert len(measured) == 2, "both are known, and the context's size does not matter"


def test_drafts_are_known_apart(open_: Open, measured: list[float], heard: Heard) -> None:
    open_(OpenRequest(load=ONE)).keep()
    lookups = open_(OpenRequest(load=ONE, draft="ngram"))
    assert (len(measured), heard.notices) == (2, [])
    assert lookups.engine.experience.costs.profile.draft_s is None
    lookups.keep()
    assert open_(OpenRequest(load=ONE)).engine.experience.costs.profile.draft_s == 0.001


@pytest.mark.parametrize("request_", [OpenRequest(load=ONE, draft="none"), OpenRequest(load=ONE, gamma=3)])
def test_nothing_is_measured_for_plain_decoding_and_fixed_lengths(
    open_: Open, measured: list[float], request_: OpenRequest
) -> None:
    opened = open_(request_)
    assert not measured and not opened.engine.has_experience
    opened.keep()
    assert not Store(opened.target_path, opened.draft_path).path.exists()


def test_a_fixed_length_does_not_forget_what_is_known(open_: Open, measured: list[float]) -> None:
    """A chat may begin with --gamma and leave it to the autopilot later."""
    first = open_(OpenRequest(load=ONE))
    known = converse(first)
    first.keep()
    assert open_(OpenRequest(load=ONE, gamma=3)).engine.experience.to_dict() == known
    assert measured == [2.0]


def test_another_draft_and_back(open_: Open, measured: list[float], heard: Heard) -> None:
    opened = open_(OpenRequest(load=ONE))
    known = converse(opened)
    lookups = changed(opened, OpenRequest(load=ONE, draft="ngram"), heard)
    assert (lookups.draft, lookups.draft_path, len(measured)) == ("ngram", None, 2)
    back = changed(lookups, OpenRequest(load=ONE, draft="model"), heard)
    assert (back.engine.experience.to_dict(), len(measured)) == (known, 2)
    back.engine.release_draft()


def test_the_same_draft_again_keeps_what_was_learned(open_: Open, heard: Heard) -> None:
    opened = open_(OpenRequest(load=ONE))
    opened.keep()
    known = converse(opened)
    again = changed(opened, OpenRequest(load=ONE, draft="model"), heard)
    assert again.engine.experience.to_dict() == known
    again.engine.release_draft()


def test_files_that_have_gone_meanwhile_cost_no_answer(open_: Open, tmp_path: Path) -> None:
    target, draft = (Path(shutil.copy(path, tmp_path)) for path in (TARGET, DRAFT))
    opened = open_(OpenRequest(load=ONE, model=str(target), draft=str(draft)))
    draft.unlink()
    opened.keep()


def test_a_damaged_file_is_measured_again_and_healed(open_: Open, measured: list[float], heard: Heard) -> None:
    opened = open_(OpenRequest(load=ONE))
    store = Store(opened.target_path, opened.draft_path)
    store.path.parent.mkdir(parents=True)
    store.path.write_text('{"entries": [{"setting": {}, "experience": NaN}]}')
    open_(OpenRequest(load=ONE)).keep()
    assert (len(measured), heard.notices) == (2, [])
    assert isinstance(store.load(opened.setting), Experience)


def test_the_toy_runtime_keeps_nothing(
    open_: Open, measured: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tree").write_text("a file that happens to be called like a toy")
    opened = open_(OpenRequest(backend="toy"))
    converse(opened)
    opened.keep()
    assert measured == [0.5]
    assert not (tmp_path / "EDGESPEC_CACHE_DIR").exists()
