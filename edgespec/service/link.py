"""This process' end of the pipe to an engine process: it sends without waiting, and notices silence."""

from __future__ import annotations

import os
import pickle
import re
import signal
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from select import POLLIN, POLLOUT, poll
from typing import Any, NamedTuple

from edgespec.controller.store import calibration_folder
from edgespec.errors import BackendError
from edgespec.files import write_atomically
from edgespec.service.client import ModelInfo

_TICK_S = 0.5
_SMALL = 2000  # bytes; a pipe that has room has room for as many, also on macOS


class Silence(Exception):
    """The other process has said nothing for too long."""


class Link:
    """Messages to and from the process at the other end. `send` from any thread, `receive` from one.

    silent_s  seconds for which the process has said nothing, since its first message. Counted in steps that this
              process has waited, so that none count in which both were stopped
    """

    def __init__(self, connection: Connection, max_silence_s: float) -> None:
        self.silent_s = 0.0
        self._connection = connection
        self._max_silence_s = max_silence_s
        self._has_spoken = False
        self._arrival, self._room = poll(), poll()
        self._arrival.register(connection.fileno(), POLLIN)
        self._room.register(connection.fileno(), POLLOUT)
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._n_queued = 0  # messages that the sender has not sent yet
        self._sending = threading.Lock()
        self._sender = threading.Thread(target=self._send_all, name="edgespec-link", daemon=True)
        self._sender.start()

    def send(self, message: Any) -> None:
        """Returns at once: a process that is stopped does not read, and a pipe holds little. Raises PicklingError."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            if self._n_queued or len(data) > _SMALL or not self._room.poll(0):
                self._n_queued += 1
                self._outbox.put(data)
                return
            with suppress(OSError):  # the process has ended; `receive` tells
                self._connection.send_bytes(data)

    def receive(self) -> Any:
        """The next message. Raises Silence, and EOFError or OSError once the process has ended."""
        while not self._arrival.poll(_TICK_S * 1000):
            self.silent_s += _TICK_S * self._has_spoken
            if self.silent_s >= self._max_silence_s:
                raise Silence
        message = pickle.loads(self._connection.recv_bytes())
        self.silent_s, self._has_spoken = 0.0, True
        return message

    def close(self) -> None:
        """Drop what has not been sent. The process has ended: what is being sent to it fails at once."""
        self._outbox.put(None)
        self._sender.join()
        self._connection.close()

    def _send_all(self) -> None:
        with suppress(OSError):  # the process has ended; `receive` tells
            while (data := self._outbox.get()) is not None:
                self._connection.send_bytes(data)
                with self._sending:
                    self._n_queued -= 1


# Messages between a process and the engine process that it started, one type each way.


class Call(NamedTuple):
    """Call `method` of the EngineClient; its stream is number `number`. Without a method: cancel that stream."""

    number: int
    method: str = ""
    arguments: tuple[Any, ...] = ()
    has_reporter: bool = False


class Report(NamedTuple):
    """An event of a stream that is a call of its Reporter."""

    method: str
    arguments: tuple[Any, ...]


class Update(NamedTuple):
    """New events of streams by their numbers, and perhaps the end of one. An empty one is a sign of life: the thread
    that owns the models goes on.

    ended       number of the stream that has ended
    model_info  the engine's at that time, where it is another than at the last end
    """

    events: dict[int, list[Any]]
    ended: int | None = None
    error: BaseException | None = None
    model_info: tuple[ModelInfo | None] | None = None


# The output of an engine process, and what it tells of the end of the process.


_MAX_BYTES = 256 * 1024
_MAX_WORDS = 200
_FAULT = "Fatal Python error: "  # a dump of Python's stacks follows
_TOLD = re.compile(r"^error: (.+)\.\nhint: (.+)$", re.MULTILINE)  # of backends.llamacpp.rpc, before it ends the process
_CAUSE = re.compile(r"GGML_ASSERT|\berror\b|\bfailed\b|\w(Error|Exception)\b|what\(\):|out of memory", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Death:
    """The end of an engine process that nobody had closed.

    cause     for counters: a signal's name, 'exit', 'memory', 'silence', 'stopped' or 'worker'
    reason    a clause for people, without a full stop
    is_asked  whether it was ended on request
    is_told   whether somebody has heard of it
    log       the file that keeps the output; None if there was none
    hint      what to do before the model is opened again, as a sentence; "" for nothing
    """

    cause: str
    reason: str
    is_asked: bool = False
    is_told: bool = False
    log: Path | None = None
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Output:
    """A descriptor that goes to the process that is being started."""

    descriptor: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (reduction.DupFd(self.descriptor),)

    def redirect(self) -> None:
        """Make it the standard output of this process, and its standard error."""
        for stream in (1, 2):
            os.dup2(self.descriptor, stream)
        os.close(self.descriptor)


def _receive(duplicate: Any) -> Output:
    return Output(duplicate.detach())


class EngineLog:
    """The output of an engine process. The file has no name, so that none is left whichever process is killed."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._oom_kills = _count_oom_kills()

    @property
    def output(self) -> Output:
        """The descriptor that the process writes to."""
        return Output(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def explain(self, exit_code: int) -> Death:
        """Why the process has ended, with its last words. Its output is kept in `last_log()`."""
        name = _name_signal(-exit_code) if exit_code < 0 else ""
        text = self._read()
        log = _keep(text) if text.strip() else None
        if name == "SIGKILL" and _count_oom_kills() > self._oom_kills:
            return Death("memory", "the system ran out of memory and killed the engine (SIGKILL)", log=log)
        if exit_code == BackendError.exit_code and (told := _TOLD.findall(text)):
            reason, hint = told[-1]
            return Death("worker", reason[0].lower() + reason[1:], log=log, hint=hint)
        words = find_last_words(text)
        end = name or f"code {exit_code}"
        return Death(name or "exit", f"the engine's process ended with {end}{words and ': '}{words}", log=log)

    def _read(self) -> str:
        descriptor = self._file.fileno()  # whose position is that of the process that writes
        start = max(0, os.fstat(descriptor).st_size - _MAX_BYTES)
        return os.pread(descriptor, _MAX_BYTES, start).decode("utf-8", "replace")


def last_log() -> Path:
    """The file that keeps the output of the engine process that died last."""
    return calibration_folder().parent / "last-engine-death.log"


def find_last_words(text: str) -> str:
    """The line that tells why a process ended: the last one that names an error, else the last one; "" if none.

    Runtimes and Python write their stacks after that line.
    """
    lines = [line.strip() for line in text.partition(_FAULT)[0].split("\n") if line.strip()]
    causes = [line for line in lines if _CAUSE.search(line)]
    return (causes or lines or [""])[-1][:_MAX_WORDS].rstrip(".")


def _keep(text: str) -> Path | None:
    with suppress(OSError):
        path = last_log()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
        return path
    return None


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _count_oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since its start; 0 where it does not tell."""
    with suppress(OSError, ValueError):
        counts = dict(line.split(" ", 1) for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counts.get("oom_kill", 0))
    return 0
