"""Runs functions in processes of their own: for code that may abort, cannot be interrupted, or is not trusted."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from select import POLLIN, poll
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from tempfile import TemporaryFile
from threading import Lock
from time import monotonic
from typing import Any, TypeVar

from edgespec.cancel import check_cancelled
from edgespec.errors import Cancelled

T = TypeVar("T")
_POLL_S = 0.1
_WATCH_MS = 50  # between two looks at the memory of a Helper's process
_START_S = 60.0
_ORPHAN_S = 60


class ChildDied(Exception):
    """The process ended without an answer. A Helper's has a clause as its message, such as "ended unexpectedly"."""


class ChildStopped(ChildDied):
    """A Helper's process took too much time or memory for an answer, and would again."""


def run_in_child(work: Callable[..., T], *args: Any, on_poll: Callable[[], None] = lambda: None) -> T:
    """The result of `work`, an importable function, for `args`. `on_poll` is called 10 times a second.

    The main module of the program is not imported again, as multiprocessing does: a script that has no guard for that
    may call this too. Raises what `work` raises, ChildDied, Cancelled.
    """
    with TemporaryFile() as call:  # a pipe holds 64 KiB, and `communicate` sends no more once it has timed out
        pickle.dump((work, args), call)
        call.seek(0)
        with block_sigint(), Popen(python_command(__name__, "serve_once"), stdin=call, stdout=PIPE) as child:
            while True:
                with suppress(TimeoutExpired):
                    answer, _ = child.communicate(timeout=_POLL_S)
                    break
                try:
                    check_cancelled()
                    on_poll()
                except Cancelled:
                    child.terminate()
                    raise
    if child.returncode or not answer:
        raise ChildDied
    result, error = pickle.loads(answer)
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def python_command(module: str, function: str) -> list[str]:
    """The command that calls a function of a module in a process of its own.

    It finds modules where this process does, and none in the present folder, where a user may have a numpy.py.
    """
    path = [each for each in sys.path if each]
    start = f"import sys; sys.path[:] = {path!r}; from {module} import {function}; {function}()"
    return [sys.executable, "-c", start]


def serve_once() -> None:
    """Run the call that arrives on stdin and write its outcome; what the function prints goes to stderr."""
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)
        work, args = pickle.load(sys.stdin.buffer)
        outcome: tuple[Any, Exception | None]
        try:
            outcome = (work(*args), None)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            outcome = (None, error)
        pickle.dump(outcome, output)


@contextmanager
def block_sigint() -> Iterator[None]:
    """Processes started inside inherit a blocked SIGINT, so that Ctrl-C reaches this process alone."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Helper:
    """A process that answers one question at a time, and is killed when an answer takes too long or too much memory.

    It starts with the first question, and again after it has ended. What it runs need not be trusted: its answers are
    JSON values. Any thread may ask.
    """

    def __init__(self, module: str, setup: Any, deadline_s: float, max_bytes: int) -> None:
        """`module` has a function `main` that calls `answer_questions`, which gets `setup`.

        `deadline_s` is for each question, without the process's start; `max_bytes` is all memory of the process.
        """
        self._module = module
        self._setup = setup
        self._deadline_s = deadline_s
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._process: Popen[bytes] | None = None
        self._is_ready = False

    def start(self) -> None:
        """Start the process before it is asked; this does not wait for it."""
        with suppress(OSError), self._lock:
            self._begin()

    def ask(self, question: Any) -> Any:
        """The answer to what can be pickled. Raises ChildDied."""
        with self._lock:
            try:
                process = self._begin()
                if not self._is_ready:
                    self._wait_for_start(process)
                self._send(process, question)
                return self._receive(process, self._deadline_s)
            except (OSError, ValueError) as error:
                self._end()
                raise ChildDied("cannot be run in a process of its own") from error
            except BaseException:  # an answer that nobody reads must not be the next one's
                self._end()
                raise

    def _wait_for_start(self, process: Popen[bytes]) -> None:
        try:
            self._receive(process, _START_S)
        except ChildStopped as error:  # by a busy machine, whatever is asked
            raise ChildDied("does not start") from error
        self._is_ready = True

    def close(self) -> None:
        """End the process, also while it is being asked."""
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end()

    def forget(self) -> None:
        """Start another process at the next question, in a fork of the process that has started the present one."""
        self._lock, self._process = Lock(), None

    def _begin(self) -> Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            command = python_command(self._module, "main")
            with block_sigint():
                self._process = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
            self._is_ready = False
            self._send(self._process, self._setup)
        return self._process

    def _send(self, process: Popen[bytes], question: Any) -> None:
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(question))
        process.stdin.flush()

    def _receive(self, process: Popen[bytes], deadline_s: float) -> Any:
        assert process.stdout is not None
        arrival, end_s = poll(), monotonic() + deadline_s
        arrival.register(process.stdout, POLLIN)
        while not arrival.poll(_WATCH_MS):
            if monotonic() > end_s:
                raise ChildStopped(f"takes more than {deadline_s:g} seconds")
            import psutil  # few answers take this long

            with suppress(psutil.Error):
                if psutil.Process(process.pid).memory_info().rss > self._max_bytes:
                    raise ChildStopped("takes too much memory")
        if not (answer := process.stdout.readline()):
            raise ChildDied("ended unexpectedly")
        return json.loads(answer)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def answer_questions(begin: Callable[[Any], Callable[[Any], Any]]) -> None:
    """Run a Helper's process until its input ends. `begin` gets the setup, and returns what answers a question."""
    with suppress(EOFError), os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)
        answer = begin(pickle.load(sys.stdin.buffer))
        found = None  # the first line says that the process is ready
        while True:
            output.write(json.dumps(found).encode() + b"\n")
            output.flush()
            question = pickle.load(sys.stdin.buffer)
            signal.alarm(_ORPHAN_S)  # the kernel ends this process if the one that asks has died
            found = answer(question)
            signal.alarm(0)
