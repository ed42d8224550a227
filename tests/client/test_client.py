"""An EngineClient on a thread and in a process of its own: the same answers and errors."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest

from edgespec.autopilot.speculation import Speculation
from edgespec.backends.options import LoadOptions
from edgespec.client.client import EngineClient, require_model
from edgespec.client.local import LocalEngine
from edgespec.client.process import EngineProcess
from edgespec.client.worker import Worker
from edgespec.core.protocols import Step
from edgespec.engine.events import Finished, MemoryUse
from edgespec.errors import ContextOverflow, DoesNotFit, InvalidRequest, UnknownModel
from edgespec.machines.memory import RESERVE_BYTES, DeviceMemory, Memory
from edgespec.models.load_config import LoadConfig, MemoryOptions
from edgespec.text.stream import Piece
from tests.client.requests import TOY, Heard, endless, request, tokens_of, until_it_speaks
from tests.gguf_models import DRAFT

pytestmark = pytest.mark.usefixtures("folders")


@pytest.fixture(params=[LocalEngine, EngineProcess])
def client(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    made: EngineClient = request.param()
    yield made
    made.close()


def test_a_model_is_opened_and_answers(client: EngineClient) -> None:
    assert client.model_info is None
    (model_info,) = client.open(TOY, Heard())
    assert client.model_info == model_info == require_model(client)
    assert (model_info.name, model_info.draft, model_info.context_size) == ("tree", "ngram+model", 200_000)
    events = list(client.stream(request()))
    assert isinstance(events[-1], Finished) and len(events[-1].tokens) == 40
    said = "".join(event.text for event in events if isinstance(event, Piece))
    assert said and sum(len(event.tokens) for event in events if isinstance(event, Step)) == 40
    assert any(event.n_accepted for event in events if isinstance(event, Step))
    assert client.resident > 10 * 2**20


def test_a_device_may_compile_its_kernels_before_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes longer than a process may say nothing, with drivers that have none stored."""
    device = (DeviceMemory("Vulkan0", 2**30, 2**30),)
    monkeypatch.setattr("edgespec.client.local.device_memory", lambda *_: device)
    with closing(LocalEngine()) as engine:
        list(engine.open(TOY, Heard()))
        monkeypatch.setattr(Worker, "silent_s", 100.0)
        assert engine.silent_s == 0.0
        with pytest.raises(ContextOverflow):
            list(engine.stream(request("long " * 100_000)))
        assert engine.silent_s == 0.0, "nothing was computed"
        monkeypatch.setattr(Worker, "silent_s", 700.0)
        assert engine.silent_s == 100.0, "a device may hang, too"
        monkeypatch.setattr(Worker, "silent_s", 100.0)
        list(engine.stream(request()))
        assert engine.silent_s == 100.0


def test_earlier_answers_are_drafted_from(client: EngineClient, tmp_path: Path) -> None:
    """After another draft was opened, and after the model was opened again, too."""

    def count_drafted(use: MemoryUse | None) -> int:
        events = client.stream(replace(request(), memory=use))
        return sum(step.decision.drafter == "suffix" for step in events if isinstance(step, Step) and step.decision)

    config = replace(TOY, draft="suffix", memory=MemoryOptions(tmp_path / "memory"))
    (model_info,) = client.open(config, Heard())
    assert model_info.draft == "suffix"
    assert not count_drafted(MemoryUse())
    assert count_drafted(MemoryUse()) and not count_drafted(None) and not count_drafted(MemoryUse("another"))
    (model_info,) = client.change_draft(replace(config, draft="auto"), Heard())
    assert model_info.draft == "ngram+suffix+model"
    list(client.open(config, Heard()))
    assert count_drafted(MemoryUse())


def test_another_way_to_draft_is_for_one_generation(client: EngineClient) -> None:
    list(client.open(TOY, Heard()))
    client.speculate("off").result()
    plain = list(client.stream(request()))
    drafted = list(client.stream(request(), Speculation(("model",), 2)))
    assert not any(event.n_drafted for event in plain if isinstance(event, Step))
    assert any(event.n_drafted for event in drafted if isinstance(event, Step))
    after = require_model(client)
    assert after.is_paused and after.speculation == Speculation(("ngram", "model"), 3)


def test_speculation_is_switched_amid_an_answer(client: EngineClient) -> None:
    list(client.open(TOY, Heard()))
    job = client.stream(endless())
    events = until_it_speaks(job)
    assert client.speculate("off").result().is_paused and require_model(client).is_paused
    for event in events:
        if isinstance(event, Step) and not event.n_drafted:
            break
    else:
        raise AssertionError("it drafted to the end")
    job.cancel()
    assert [event.reason for event in events if isinstance(event, Finished)] == ["cancelled"]
    assert len(tokens_of(client.stream(request()))) == 40


def test_errors_are_told_and_nothing_is_lost(client: EngineClient) -> None:
    with pytest.raises(InvalidRequest, match="no model is open") as caught:
        list(client.stream(request()))
    assert caught.value.hint == "/model chooses one."
    with pytest.raises(InvalidRequest, match="no model is open"):
        client.speculate("off").result()
    list(client.open(TOY, Heard()))
    with pytest.raises(InvalidRequest, match="/spec takes on, off, auto"):
        client.speculate("sideways").result()
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        list(client.stream(request("")))
    with pytest.raises(UnknownModel):
        list(client.change_draft(LoadConfig(model="tree", backend="toy", draft="nothing"), Heard()))
    assert require_model(client).draft == "ngram+model"
    huge = LoadConfig(model="python-6m", load=LoadOptions(context_size=2**24))
    for wrong in (replace(TOY, model="nothing"), LoadConfig(model="typo"), LoadConfig(model="./none.gguf"), huge):
        with pytest.raises(DoesNotFit if wrong is huge else UnknownModel):
            list(client.open(wrong, Heard()))
        assert require_model(client).name == "tree"
    assert len(tokens_of(client.stream(request()))) == 40


def test_a_model_without_memory_beside_the_open_one_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that fails later than the check, the first one is opened again."""
    engine, one = LocalEngine(), LoadOptions(context_size=256, threads=1)
    small = LoadConfig(model="python-6m", draft="none", load=one)
    list(engine.open(small, Heard()))
    fit = require_model(engine).fit
    assert fit is not None

    def read(*_: object) -> Memory:
        return Memory(RESERVE_BYTES + (fit.needed // 2 if engine.loaded is not None else 2 * fit.needed))

    monkeypatch.setattr("edgespec.models.plan.read_memory", read)
    with pytest.raises(InvalidRequest, match="--draft-tree needs --draft-max"):
        list(engine.open(replace(small, draft="ngram", draft_tree=3), Heard()))
    assert engine.loaded is not None and engine.loaded.config == small
    assert len(tokens_of(engine.stream(request("def f(", 24)))) == 24
    list(engine.open(replace(small, model=str(DRAFT)), Heard()))
    assert require_model(engine).name == str(DRAFT)
    engine.close()


def test_a_bug_is_told_with_its_place(client: EngineClient) -> None:
    list(client.open(TOY, Heard()))
    with pytest.raises(Exception, match="'str' object has no attribute") as caught:
        list(client.stream("not a request"))  # type: ignore[arg-type]
    assert "engine.py" in "".join(traceback.format_exception(caught.value))
    assert len(tokens_of(client.stream(request()))) == 40


def test_what_the_autopilot_knows(client: EngineClient) -> None:
    list(client.open(LoadConfig(draft_max=2, load=LoadOptions(context_size=256, threads=1)), Heard()))
    assert client.draft_stats().result() is None and require_model(client).plain_speed is None
    client.speculate("auto").result()
    assert len(tokens_of(client.stream(request("def f(", 24)))) == 24
    known, speed = client.draft_stats().result(), require_model(client).plain_speed
    assert known is not None and speed is not None and speed == pytest.approx(1 / known.costs.seconds(1))


def test_loading_is_reported(client: EngineClient) -> None:
    heard = Heard()
    list(client.open(LoadConfig(draft="none", load=LoadOptions(context_size=256, threads=1)), heard))
    assert heard.fractions and heard.fractions == sorted(heard.fractions) and heard.fractions[-1] == 1.0
    fit = require_model(client).fit
    assert fit is not None and fit.target.weights > 2**20
    assert isinstance(client.devices().result(), tuple)


@pytest.mark.parametrize("kind", [LocalEngine, EngineProcess])
def test_closing_stops_an_endless_answer(kind: type[LocalEngine | EngineProcess]) -> None:
    client = kind()
    list(client.open(TOY, Heard()))
    until_it_speaks(client.stream(endless()))
    began_s = monotonic()
    client.close()
    assert monotonic() - began_s < 60
    client.close()
