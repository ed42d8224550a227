"""The process of an engine: what is sent and when, and its end, whatever ends it."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import pytest

from edgespec.client import child
from edgespec.client.child import Outbox
from edgespec.client.death import Death, explain, find_last_words
from edgespec.client.link import Link, Update
from edgespec.client.process import EngineProcess
from edgespec.errors import BackendError, InvalidRequest
from edgespec.models.load_config import MemoryOptions
from edgespec.text.stream import Piece
from tests.client.requests import TOY, Heard, endless, request, tokens_of, until_it_speaks


def test_messages_arrive_in_order_and_sending_never_waits():
    ours, theirs = Pipe()
    link = Link(ours, max_silence_s=60)
    sent = [b"small", b"x" * 2**20, b"small again", b"y" * 2**20, *(b"%d" % n for n in range(2000))]
    for message in sent:  # more than the pipe holds, and nobody reads yet
        link.send(message)
    assert [pickle.loads(theirs.recv_bytes()) for _ in sent] == sent
    link.send("the queue is empty again")
    assert pickle.loads(theirs.recv_bytes()) == "the queue is empty again"
    theirs.close()
    link.send("to nobody")
    link.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        ("loading\n\nterminate called after 'std::bad_alloc'\n  what():  bad_alloc\n", "what():  bad_alloc"),
        ("x.cpp:9: GGML_ASSERT(a) failed\n#0  at wait4.c:30\n30\tin wait4.c\n", "x.cpp:9: GGML_ASSERT(a) failed"),
        ("ggml_cuda: out of memory\nloading\nFatal Python error: Aborted\n\nTypeError\n", "ggml_cuda: out of memory"),
        ("Traceback\n  File 'a'\nValueError: no such shape.\n", "ValueError: no such shape"),
        ("no word of it\nnor here\n", "nor here"),
    ],
)
def test_last_words(text: str, words: str) -> None:
    assert find_last_words(text) == words


@pytest.mark.parametrize(
    ("code", "text", "hint"),
    [
        (-6, "  what():  std::bad_alloc\n", "Memory ran out: "),
        (-6, "  what():  vk::Device::allocateMemory: ErrorOutOfDeviceMemory\n", "Memory ran out: "),
        (-6, "ggml-cuda.cu:98: CUDA error: out of memory\n", "Memory ran out: "),
        (-6, "ggml-backend.cpp:9: pre-allocated tensor (a) in a buffer that cannot run the operation (NONE)\n", ""),
        (-6, "x.cpp:9: GGML_ASSERT(a) failed\n", ""),
        (-9, "", "The system kills processes when memory runs out."),
    ],
)
@pytest.mark.usefixtures("folders")
def test_what_to_do_after_a_death(code: int, text: str, hint: str, tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.write_text(text)
    with output.open("rb") as file:
        found = explain(code, file).hint
    assert found.startswith(hint) and bool(found) == bool(hint)


class Sent:
    """An outbox at a time that the test sets, and what has arrived from it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1.0
        self._ours, self._theirs = Pipe()
        monkeypatch.setattr(child, "perf_counter", lambda: self.now_s)
        self.outbox = Outbox(self._theirs)

    def put(self, *events: object, number: int = 0) -> None:
        for event in events:
            self.outbox.put(number, [event], takes_turns=True)

    def turn(self, seconds: float) -> None:
        """A forward has taken so long."""
        self.now_s += seconds
        self.outbox.flush_after_turn()

    def messages(self) -> list[Update]:
        return list(_receive(self._ours))


def _receive(link: Connection) -> Iterator[Update]:
    while link.poll(0):
        message = link.recv()
        assert isinstance(message, Update)
        yield message


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    return Sent(monkeypatch)


def test_where_forwards_are_slow_no_event_waits_for_the_next_one(sent: Sent) -> None:
    for i in range(3):
        sent.now_s += 0.04
        sent.put(f"step {i}", f"piece {i}", f"another {i}")
        sent.turn(0)
        arrived = [event for message in sent.messages() for event in message.events[0]]
        assert arrived == [f"step {i}", f"piece {i}", f"another {i}"]


def test_where_turns_are_fast_the_events_of_all_streams_are_one_message(sent: Sent) -> None:
    first, *more = (Piece(text, "answer", "") for text in "abcd")
    sent.put(first)
    sent.turn(0.001)
    sent.put(first, number=1)
    sent.turn(0.001)
    assert len(sent.messages()) == 2, "the first text of a stream waits for nothing"
    for piece in more:
        sent.put(piece)
        sent.put(piece, number=1)
        sent.turn(0.003)
        assert not sent.messages()
    sent.put(first)
    sent.turn(0.0011)
    assert sent.messages() == [Update({0: [*more, first], 1: more})]
    sent.put(first)
    sent.outbox.flush(0, None, None)
    (last,) = sent.messages()
    assert last == Update({0: [first]}, 0), "none is lost"


def test_the_first_text_waits_for_nothing(sent: Sent) -> None:
    sent.put("progress")
    sent.turn(0.001)
    assert len(sent.messages()) == 1
    sent.put(Piece("a", "answer", ""))
    sent.turn(0.001)
    assert sent.messages() == [Update({0: [("a", "answer", "")]})]


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


def test_an_argument_that_only_a_script_knows_is_an_error_of_its_call(
    apart: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = type("Own", (str,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Own", own, raising=False)
    list(apart.open(TOY, Heard()))
    with pytest.raises(InvalidRequest, match="cannot be sent to the engine's process"):
        list(apart.stream(request(own("hello"))))
    assert len(tokens_of(apart.stream(request()))) == 40


def test_the_end_of_the_process_is_told_and_the_next_model_opens(apart: EngineProcess) -> None:
    list(apart.open(TOY, Heard()))
    job = apart.stream(endless())
    events = until_it_speaks(job)
    waiting = apart.stream(request())
    os.kill(apart._process.pid, signal.SIGKILL)
    with pytest.raises(BackendError, match="SIGKILL") as caught:
        list(events)
    assert "/model" in caught.value.hint
    with pytest.raises(BackendError, match="SIGKILL"):
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
        os.kill(apart._process.pid, signal.SIGSTOP)
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


class Broken(Heard):
    """A Reporter that fails."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def notice(self, text: str) -> None:
        raise self._error


@pytest.mark.parametrize(
    "error", [ValueError("no screen"), OSError("no screen")], ids=lambda error: type(error).__name__
)
def test_a_reporter_that_fails_leaves_nobody_waiting(apart: EngineProcess, tmp_path: Path, error: Exception) -> None:
    config = replace(TOY, memory=MemoryOptions(tmp_path / "memory"))  # a new folder is told of
    with pytest.raises(BackendError, match=r"^what the engine said could not be taken: no screen\.$"):
        list(apart.open(config, Broken(error)))
    list(apart.open(config, Heard()))
    assert len(tokens_of(apart.stream(request()))) == 40


def test_a_process_can_be_killed_at_once(apart: EngineProcess) -> None:
    list(apart.open(TOY, Heard()))
    job = apart.stream(endless())
    until_it_speaks(job)
    os.kill(apart._process.pid, signal.SIGSTOP)
    apart.kill("the model was stopped")
    with pytest.raises(BackendError, match=r"^the model was stopped\.$"):
        list(job)


def test_it_ends_with_the_program_that_started_it(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, signal\n"
        "from edgespec.client.process import EngineProcess\n"
        "from tests.client.requests import TOY, Heard, endless, until_it_speaks\n"
        "apart = EngineProcess()\n"  # a script without a guard for its main module
        "list(apart.open(TOY, Heard()))\n"
        "until_it_speaks(apart.stream(endless()))\n"
        "print(apart._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(root)})
    end = monotonic() + 60
    while psutil.pid_exists(int(done.stdout)) and psutil.Process(int(done.stdout)).status() != psutil.STATUS_ZOMBIE:
        assert monotonic() < end, "the engine goes on for nobody"
        sleep(0.05)
