"""The Stage on a thread and in a process of its own: the same answers, errors and manners; and the death of either."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest

from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.drafting import Speculation
from edgespec.engine.events import Event, Finished, Request
from edgespec.errors import BackendError, Cancelled, InvalidRequest, UnknownModel
from edgespec.planner.plan import OpenRequest
from edgespec.service.client import Stage, standing_of
from edgespec.service.local import Here
from edgespec.service.process import Apart
from edgespec.service.worker import Job
from edgespec.text.stream import Piece

TOY = OpenRequest(model="tree", backend="toy", gamma=3, load=LoadOptions(context_size=200_000))
GREEDY = SamplingParams(temperature=0.0, logit_bias=((256, -1000.0),))  # 256 ends a text


class Heard:
    """A Reporter that remembers."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.fractions: list[float] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def download(self, name: str, done: int, total: int) -> None:
        raise AssertionError("nothing is downloaded")

    def loading(self, name: str, fraction: float) -> None:
        self.fractions.append(fraction)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"EDGESPEC_{name}_DIR", str(tmp_path / name.lower()))


@pytest.fixture(params=[Here, Apart])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    made: Stage = request.param()
    yield made
    made.close()


@pytest.fixture
def apart() -> Iterator[Apart]:
    made = Apart()
    yield made
    made.close()


def request(text: str = "hello", tokens: int = 40) -> Request:
    return Request(text, GREEDY, tokens, seed=1)


def endless() -> Request:
    return request(tokens=150_000)


def tokens_of(job: Job[Event]) -> tuple[int, ...]:
    (finished,) = [event for event in job if isinstance(event, Finished)]
    return finished.tokens


def until_it_speaks(job: Job[Event]) -> Iterator[Event]:
    events = iter(job)
    while not isinstance(next(events), Piece):
        pass
    return events


def test_a_model_is_opened_and_answers(stage: Stage) -> None:
    assert stage.standing is None
    (standing,) = stage.open(TOY, Heard())
    assert stage.standing == standing == standing_of(stage)
    assert (standing.name, standing.draft, standing.context_size) == ("tree", "model", 200_000)
    events = list(stage.stream(request()))
    assert isinstance(events[-1], Finished) and len(events[-1].tokens) == 40
    said = "".join(event.text for event in events if isinstance(event, Piece))
    assert said and sum(len(event.tokens) for event in events if isinstance(event, Step)) == 40
    assert any(event.n_accepted for event in events if isinstance(event, Step))
    assert stage.resident > 10 * 2**20


def test_the_two_give_the_same_tokens(apart: Apart) -> None:
    here = Here()
    try:
        for each in (here, apart):
            list(each.open(TOY, Heard()))
        assert tokens_of(here.stream(request())) == tokens_of(apart.stream(request()))
    finally:
        here.close()


def test_another_way_to_draft_is_for_one_generation(stage: Stage) -> None:
    list(stage.open(TOY, Heard()))
    stage.speculate("off")
    plain = list(stage.stream(request()))
    drafted = list(stage.stream(request(), Speculation("model", 2)))
    assert not any(event.n_drafted for event in plain if isinstance(event, Step))
    assert any(event.n_drafted for event in drafted if isinstance(event, Step))
    after = standing_of(stage)
    assert after.is_paused and after.speculation == Speculation("model", 3)


def test_speculation_is_switched_amid_an_answer(stage: Stage) -> None:
    list(stage.open(TOY, Heard()))
    job = stage.stream(endless())
    events = until_it_speaks(job)
    assert stage.speculate("off").is_paused and standing_of(stage).is_paused
    for event in events:
        if isinstance(event, Step) and not event.n_drafted:
            break
    else:
        raise AssertionError("it drafted to the end")
    job.cancel()
    assert [event.reason for event in events if isinstance(event, Finished)] == ["cancelled"]
    assert len(tokens_of(stage.stream(request()))) == 40


def test_a_job_that_has_not_begun_can_be_cancelled(stage: Stage) -> None:
    list(stage.open(TOY, Heard()))
    first, second = stage.stream(endless()), stage.stream(request())
    until_it_speaks(first)
    second.cancel()
    first.cancel()
    assert any(isinstance(event, Finished) for event in first)
    with suppress(Cancelled):
        assert [event.reason for event in second if isinstance(event, Finished)] == ["cancelled"]


def test_errors_are_told_and_nothing_is_lost(stage: Stage) -> None:
    with pytest.raises(InvalidRequest, match="no model is open") as caught:
        list(stage.stream(request()))
    assert caught.value.hint == "/model chooses one."
    with pytest.raises(InvalidRequest, match="no model is open"):
        stage.speculate("off")
    list(stage.open(TOY, Heard()))
    with pytest.raises(InvalidRequest, match="/spec takes on, off, auto"):
        stage.speculate("sideways")
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        list(stage.stream(request("")))
    with pytest.raises(UnknownModel):
        list(stage.change_draft(OpenRequest(model="tree", backend="toy", draft="nothing"), Heard()))
    assert standing_of(stage).draft == "model"
    assert len(tokens_of(stage.stream(request()))) == 40


def test_a_bug_is_told_with_its_place(stage: Stage) -> None:
    list(stage.open(TOY, Heard()))
    with pytest.raises(Exception, match="'str' object has no attribute") as caught:
        list(stage.stream("not a request"))  # type: ignore[arg-type]
    assert "engine.py" in "".join(traceback.format_exception(caught.value))
    assert len(tokens_of(stage.stream(request()))) == 40


def test_what_the_autopilot_knows(stage: Stage) -> None:
    list(stage.open(OpenRequest(gamma=2, load=LoadOptions(context_size=256, threads=1)), Heard()))
    assert stage.experience() is None and standing_of(stage).plain_speed is None
    stage.speculate("auto")
    assert len(tokens_of(stage.stream(request("def f(", 24)))) == 24
    known, speed = stage.experience(), standing_of(stage).plain_speed
    assert known is not None and speed is not None and speed == pytest.approx(1 / known.costs.seconds(1))


def test_loading_is_reported(stage: Stage) -> None:
    heard = Heard()
    list(stage.open(OpenRequest(draft="none", load=LoadOptions(context_size=256, threads=1)), heard))
    assert heard.fractions and heard.fractions == sorted(heard.fractions) and heard.fractions[-1] == 1.0
    fit = standing_of(stage).fit
    assert fit is not None and fit.target.weights > 2**20
    assert isinstance(stage.devices(), tuple)


@pytest.mark.parametrize("kind", [Here, Apart])
def test_closing_stops_an_endless_answer(kind: type[Here | Apart]) -> None:
    stage = kind()
    list(stage.open(TOY, Heard()))
    until_it_speaks(stage.stream(endless()))
    began_s = monotonic()
    stage.close()
    assert monotonic() - began_s < 10


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT], ids=["kill", "abort"])
def test_the_end_of_the_process_is_told_and_the_next_model_opens(apart: Apart, number: signal.Signals) -> None:
    list(apart.open(TOY, Heard()))
    job = apart.stream(endless())
    events = until_it_speaks(job)
    waiting = apart.stream(request())
    os.kill(apart._process.pid or 0, number)
    with pytest.raises(BackendError, match=number.name) as caught:
        list(events)
    assert "/model" in caught.value.hint
    with pytest.raises(BackendError, match=number.name):
        list(waiting)
    assert apart.standing is None
    list(apart.open(TOY, Heard()))
    assert len(tokens_of(apart.stream(request()))) == 40


def test_the_last_words_of_a_dying_runtime_are_passed_on(apart: Apart) -> None:
    list(apart.open(TOY, Heard()))
    apart._log.write_text("loading\nGGML_ASSERT(n > 0) failed.\n\n")
    job = apart.stream(endless())
    os.kill(apart._process.pid or 0, signal.SIGABRT)
    with pytest.raises(BackendError, match=r"ended with SIGABRT: GGML_ASSERT\(n > 0\) failed\.$"):
        list(job)


def test_it_ends_with_the_program_that_started_it(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, signal\n"
        "from edgespec.service.process import Apart\n"
        "from tests.service.test_client import TOY, Heard, endless, until_it_speaks\n"
        "if __name__ == '__main__':\n"
        "    apart = Apart()\n"
        "    list(apart.open(TOY, Heard()))\n"
        "    until_it_speaks(apart.stream(endless()))\n"
        "    print(apart._process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(root)})
    end = monotonic() + 15
    while psutil.pid_exists(int(done.stdout)) and psutil.Process(int(done.stdout)).status() != psutil.STATUS_ZOMBIE:
        assert monotonic() < end, "the engine goes on for nobody"
        sleep(0.05)
