"""An EngineClient on a thread and in a process of its own: the same answers and errors, and the death of either."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import pytest

from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.drafting import Speculation
from edgespec.engine.events import Event, Finished, MemoryUse, Request
from edgespec.errors import BackendError, Cancelled, InvalidRequest, UnknownModel
from edgespec.planner.plan import LoadConfig, MemoryOptions
from edgespec.service.client import EngineClient, require_model
from edgespec.service.engine_log import Death
from edgespec.service.local import LocalEngine
from edgespec.service.process import EngineProcess
from edgespec.service.stream import Stream
from edgespec.text.stream import Piece

TOY = LoadConfig(model="tree", backend="toy", draft_max=3, load=LoadOptions(context_size=200_000))
GREEDY = SamplingParams(temperature=0.0, logit_bias=((256, -1000.0),))  # 256 ends a text


class Hanging:
    """A request that takes the worker's thread and no GIL, without end."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        sleep(1000)
        raise AssertionError


class Aborting:
    """An argument that ends the process which receives it, with words of llama.cpp."""

    def __reduce__(self) -> tuple[Any, ...]:
        words = "loading\na.c:1: GGML_ASSERT(n > 0) failed\n#0  0x00007f in ggml_abort ()\n[Inferior 1 detached]\n"
        return exec, (f"import os; os.write(2, {words.encode()!r}); os.abort()",)


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


@pytest.fixture(params=[LocalEngine, EngineProcess])
def client(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    made: EngineClient = request.param()
    yield made
    made.close()


@pytest.fixture
def apart() -> Iterator[EngineProcess]:
    made = EngineProcess()
    yield made
    made.close()


def request(text: str = "hello", tokens: int = 40) -> Request:
    return Request(text, GREEDY, tokens, seed=1)


def endless() -> Request:
    return request(tokens=150_000)


def tokens_of(job: Stream[Event]) -> tuple[int, ...]:
    (finished,) = [event for event in job if isinstance(event, Finished)]
    return finished.tokens


def until_it_speaks(job: Stream[Event]) -> Iterator[Event]:
    events = iter(job)
    while not isinstance(next(events), Piece):
        pass
    return events


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


def test_earlier_answers_are_drafted_from(client: EngineClient, tmp_path: Path) -> None:
    """After another draft was opened, and after the model was opened again, too."""

    def count_drafted(use: MemoryUse | None) -> int:
        events = client.stream(replace(request(), memory=use))
        return sum(step.decision.source == "suffix" for step in events if isinstance(step, Step) and step.decision)

    config = replace(TOY, draft="suffix", memory=MemoryOptions(tmp_path / "memory"))
    (model_info,) = client.open(config, Heard())
    assert model_info.draft == "suffix"
    assert not count_drafted(MemoryUse())
    assert count_drafted(MemoryUse()) and not count_drafted(None) and not count_drafted(MemoryUse("another"))
    (model_info,) = client.change_draft(replace(config, draft="auto"), Heard())
    assert model_info.draft == "ngram+suffix+model"
    list(client.open(config, Heard()))
    assert count_drafted(MemoryUse())


def test_the_two_give_the_same_tokens(apart: EngineProcess) -> None:
    here = LocalEngine()
    try:
        for each in (here, apart):
            list(each.open(TOY, Heard()))
        assert tokens_of(here.stream(request())) == tokens_of(apart.stream(request()))
    finally:
        here.close()


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


def test_a_job_that_has_not_begun_can_be_cancelled(client: EngineClient) -> None:
    list(client.open(TOY, Heard()))
    first, second = client.stream(endless()), client.stream(request())
    until_it_speaks(first)
    second.cancel()
    first.cancel()
    assert any(isinstance(event, Finished) for event in first)
    with suppress(Cancelled):
        assert [event.reason for event in second if isinstance(event, Finished)] == ["cancelled"]


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
    assert len(tokens_of(client.stream(request()))) == 40


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT], ids=["kill", "abort"])
def test_the_end_of_the_process_is_told_and_the_next_model_opens(apart: EngineProcess, number: signal.Signals) -> None:
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
    assert apart.model_info is None
    list(apart.open(TOY, Heard()))
    assert len(tokens_of(apart.stream(request()))) == 40


def test_the_last_words_of_a_dying_runtime_are_passed_on_and_its_output_is_kept() -> None:
    """The assertion counts, though stacks follow it. The calls after it hear of the same end."""
    deaths: list[Death] = []
    with closing(EngineProcess(on_death=deaths.append)) as apart:
        list(apart.open(TOY, Heard()))
        with pytest.raises(BackendError, match=r"ended with SIGABRT: a\.c:1: GGML_ASSERT\(n > 0\) failed\.$"):
            apart.count(Aborting(), {}).result()  # type: ignore[arg-type]
        with pytest.raises(BackendError, match="GGML_ASSERT"):
            list(apart.stream(request()))
        assert apart.take_failure() is None, "a caller has been told"
        (death,) = deaths
        assert death.cause == "SIGABRT" and death.log is not None and not death.is_asked
        kept = death.log.read_text()
        assert "loading\n" in kept and "Fatal Python error: Aborted" in kept and "most recent call first" in kept
        list(apart.open(TOY, Heard()))
        assert len(tokens_of(apart.stream(request()))) == 40


def test_a_process_that_says_nothing_is_ended_and_the_next_model_opens() -> None:
    """It was stopped, and reads nothing of what is sent: its callers hear of its end, and no call waits."""
    deaths: list[Death] = []
    apart = EngineProcess(max_silence_s=3.0, on_death=deaths.append)
    with closing(apart):
        list(apart.open(TOY, Heard()))
        job = apart.stream(endless())
        until_it_speaks(job)
        os.kill(apart._process.pid or 0, signal.SIGSTOP)
        more = [apart.stream(request("long " * 100_000)) for _ in range(4)]  # more than a pipe holds
        for stream in (job, *more):
            with pytest.raises(BackendError, match=r"the engine said nothing for 3 seconds and was ended\."):
                list(stream)
        assert [each.cause for each in deaths] == ["silence"] and apart.model_info is None
        list(apart.open(TOY, Heard()))
        assert len(tokens_of(apart.stream(request()))) == 40
        assert len(deaths) == 1


def test_a_worker_that_hangs_is_silence_and_an_idle_one_is_not() -> None:
    """Other threads of the process go on, as they do while native code runs."""
    apart = EngineProcess(max_silence_s=3.0)
    with closing(apart):
        list(apart.open(TOY, Heard()))
        sleep(4)
        assert len(tokens_of(apart.stream(request()))) == 40
        with pytest.raises(BackendError, match="said nothing for 3 seconds"):
            list(apart.stream(Hanging()))  # type: ignore[arg-type]


def test_a_process_can_be_killed_at_once(apart: EngineProcess) -> None:
    list(apart.open(TOY, Heard()))
    job = apart.stream(endless())
    until_it_speaks(job)
    os.kill(apart._process.pid or 0, signal.SIGSTOP)
    apart.kill("the model was stopped")
    with pytest.raises(BackendError, match=r"^the model was stopped\.$"):
        list(job)


def test_it_ends_with_the_program_that_started_it(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, signal\n"
        "from edgespec.service.process import EngineProcess\n"
        "from tests.service.test_client import TOY, Heard, endless, until_it_speaks\n"
        "if __name__ == '__main__':\n"
        "    apart = EngineProcess()\n"
        "    list(apart.open(TOY, Heard()))\n"
        "    until_it_speaks(apart.stream(endless()))\n"
        "    print(apart._process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(root)})
    end = monotonic() + 60
    while psutil.pid_exists(int(done.stdout)) and psutil.Process(int(done.stdout)).status() != psutil.STATUS_ZOMBIE:
        assert monotonic() < end, "the engine goes on for nobody"
        sleep(0.05)
