"""The end of an engine's process, whatever ends it: who hears of it, and what goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import pytest

from edgespec.errors import BackendError
from edgespec.service.link import Death
from edgespec.service.process import EngineProcess
from tests.service.requests import TOY, Heard, endless, request, tokens_of, until_it_speaks

pytestmark = pytest.mark.usefixtures("folders")


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
        "from tests.service.requests import TOY, Heard, endless, until_it_speaks\n"
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
