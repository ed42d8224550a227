"""A EngineClient in a process of its own: what draws does not hold up what decodes, and outlives it.

Python runs one thread of a process at a time, so a screen that is redrawn thirty times a second would slow decoding
down. And where a runtime ends its process, as llama.cpp does when an assertion fails, this one goes on.
"""

from __future__ import annotations

import atexit
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil

from edgespec.backends.devices import DeviceMemory
from edgespec.backends.isolated import starting
from edgespec.controller.stats import DraftStats
from edgespec.engine.drafting import Speculation
from edgespec.engine.embeddings import Embedding
from edgespec.engine.events import Event, Request
from edgespec.errors import BackendError, Cancelled, EdgespecError, reason_of
from edgespec.planner.plan import LoadConfig, Reporter
from edgespec.service.client import EngineClient, ModelInfo
from edgespec.service.local import LocalEngine
from edgespec.service.worker import Job
from edgespec.text.chat_template import Message

T = TypeVar("T")

_NAME = "edgespec-engine"
_SENT_EVERY_S = 0.01
_CLOSED_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class _Asked:
    """A method of the EngineClient to call, as piece of work `number`; no method: cancel that one."""

    number: int
    method: str = ""
    given: tuple[Any, ...] = ()
    wants_reports: bool = False


@dataclass(frozen=True, slots=True)
class _Events:
    number: int
    events: list[Any]


@dataclass(frozen=True, slots=True)
class _Reported:
    """A call of the Reporter."""

    number: int
    method: str
    given: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Ended:
    number: int
    error: BaseException | None
    model_info: ModelInfo | None


class EngineProcess:
    """Starts its process at once, and a new one, with no model open, when that has died."""

    def __init__(self, then: str = "/model opens a model again.") -> None:
        """`then` is what to tell a user to do when the process has died."""
        self._then = then
        self._numbers = count()
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job[Any]] = {}
        self._model_info: ModelInfo | None = None
        self._log = _empty_log()
        self._link: Connection | None = None
        self._start()
        atexit.register(self.close)  # before multiprocessing waits for the process, whoever forgot this

    @property
    def model_info(self) -> ModelInfo | None:
        return self._model_info

    @property
    def resident(self) -> int:
        total = int(psutil.Process().memory_info().rss)
        with suppress(psutil.Error):
            total += psutil.Process(self._process.pid).memory_info().rss
        return total

    def open(self, request: LoadConfig, reporter: Reporter) -> Job[ModelInfo]:
        return self._ask("open", request, reporter=reporter)

    def change_draft(self, request: LoadConfig, reporter: Reporter) -> Job[ModelInfo]:
        return self._ask("change_draft", request, reporter=reporter)

    def stream(self, request: Request, speculation: Speculation | None = None) -> Job[Event]:
        return self._ask("stream", request, speculation)

    def outlook(self, request: LoadConfig, reporter: Reporter) -> Job[str]:
        return self._ask("outlook", request, reporter=reporter)

    def speculate(self, argument: str) -> ModelInfo:
        (model_info,) = self._ask("speculate", argument)
        assert isinstance(model_info, ModelInfo)
        return model_info

    def draft_stats(self) -> DraftStats | None:
        (known,) = self._ask("draft_stats")
        assert known is None or isinstance(known, DraftStats)
        return known

    def count(self, prompt: str | tuple[Message, ...], variables: Mapping[str, Any]) -> Job[int]:
        return self._ask("count", prompt, dict(variables))

    def embed(self, texts: Sequence[str | Sequence[int]]) -> Job[Embedding]:
        return self._ask("embed", list(texts))

    def devices(self) -> tuple[DeviceMemory, ...]:
        (found,) = self._ask("devices")
        assert isinstance(found, tuple)
        return found

    def close(self) -> None:
        atexit.unregister(self.close)
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            with suppress(OSError):
                link.send(None)
        self._process.join(_CLOSED_WITHIN_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._listener.join()
        self._log.unlink(missing_ok=True)

    def _start(self) -> None:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        with starting():
            self._process: SpawnProcess = context.Process(target=_serve, args=(theirs, self._log), name=_NAME)
            self._process.start()
        theirs.close()  # so that the end of that process is the end of the pipe
        self._link = ours
        self._listener = threading.Thread(target=self._listen, args=(ours,), name=_NAME, daemon=True)
        self._listener.start()

    def _ask(self, method: str, *given: Any, reporter: Reporter | None = None) -> Job[Any]:
        number = next(self._numbers)
        job: _Job[Any] = _Job(lambda: self._send(_Asked(number)), reporter)
        with self._lock:
            if self._link is None:
                self._start()
            self._jobs[number] = job
        try:
            self._send(_Asked(number, method, given, reporter is not None))
        except BaseException:  # what cannot be sent is nobody's work
            del self._jobs[number]
            raise
        return job

    def _send(self, asked: _Asked) -> None:
        with self._lock, suppress(OSError):  # of a process that has died, which the listener tells
            if self._link is not None:
                self._link.send(asked)

    def _listen(self, link: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                said = link.recv()
                job = self._jobs[said.number]
                if isinstance(said, _Events):
                    for event in said.events:
                        job.put(event)
                elif isinstance(said, _Reported):
                    getattr(job.reporter, said.method)(*said.given)
                else:
                    self._model_info = said.model_info
                    del self._jobs[said.number]
                    job.end(said.error)
        self._process.join()
        with self._lock:
            if self._link is link:
                self._link = None
            self._model_info = None
            abandoned, self._jobs = self._jobs, {}
        link.close()
        for job in abandoned.values():
            job.end(BackendError(f"the engine's process ended{self._why()}.", hint=self._then))

    def _why(self) -> str:
        code = self._process.exitcode or 0
        told = f" with {signal.Signals(-code).name}" if code < 0 else f" with code {code}"
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n") if self._log.exists() else []
        words = [line.strip() for line in lines if line.strip()]
        return f"{told}: {words[-1][:200].rstrip('.')}" if words else told


class _Job(Job[T], Generic[T]):
    """Work of the other process."""

    def __init__(self, stop: Callable[[], None], reporter: Reporter | None) -> None:
        super().__init__()
        self.reporter = reporter
        self._stop = stop

    def cancel(self) -> None:
        super().cancel()
        self._stop()


# What follows runs in the other process.


def _serve(link: Connection, log: Path) -> None:
    """Do what is asked until nobody asks any more."""
    descriptor = os.open(log, os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):  # the terminal is the screen's
        os.dup2(descriptor, stream)
    _Server(link, LocalEngine()).run()


class _Server:
    def __init__(self, link: Connection, client: EngineClient) -> None:
        self._link = link
        self._client = client
        self._lock = threading.Lock()
        self._jobs: dict[int, Job[Any]] = {}

    def run(self) -> None:
        try:
            while (asked := self._link.recv()) is not None:
                if asked.method:
                    self._do(asked)
                elif (job := self._jobs.get(asked.number)) is not None:
                    job.cancel()
        except (EOFError, OSError):  # the other side has died
            pass
        finally:
            self._client.close()

    def say(self, said: _Events | _Reported | _Ended) -> None:
        with self._lock, suppress(OSError):
            self._link.send(said)

    def _do(self, asked: _Asked) -> None:
        number = asked.number
        given = (*asked.given, _Reports(number, self)) if asked.wants_reports else asked.given
        try:
            result = getattr(self._client, asked.method)(*given)
        except Exception as error:  # noqa: BLE001 - the other side tells it
            self.say(_Ended(number, _portable(error), self._client.model_info))
            return
        if isinstance(result, Job):
            self._jobs[number] = result
            threading.Thread(target=self._forward, args=(number, result), daemon=True).start()
        else:
            self.say(_Events(number, [result]))
            self.say(_Ended(number, None, self._client.model_info))

    def _forward(self, number: int, job: Job[Any]) -> None:
        error: BaseException | None = None
        try:
            for batch in job.batches(_SENT_EVERY_S):
                self.say(_Events(number, batch))
        except BaseException as caught:  # noqa: BLE001 - as above
            error = _portable(caught)
            job.cancel()  # if it is not over
        del self._jobs[number]
        self.say(_Ended(number, error, self._client.model_info))


class _Reports:
    """A Reporter whose words are said in the other process."""

    def __init__(self, number: int, server: _Server) -> None:
        self._number = number
        self._server = server

    def notice(self, text: str) -> None:
        self._server.say(_Reported(self._number, "notice", (text,)))

    def download(self, name: str, done: int, total: int) -> None:
        self._server.say(_Reported(self._number, "download", (name, done, total)))

    def loading(self, name: str, fraction: float) -> None:
        self._server.say(_Reported(self._number, "loading", (name, fraction)))


def _portable(error: BaseException) -> BaseException:
    """An error that can be sent; a bug of ours with the place it happened at."""
    if isinstance(error, EdgespecError | Cancelled):
        return error
    bug = RuntimeError(f"{type(error).__name__}: {reason_of(error)}")
    bug.add_note("".join(traceback.format_exception(error)))
    return bug


def _empty_log() -> Path:
    descriptor, name = tempfile.mkstemp(prefix="edgespec-engine-", suffix=".log")
    os.close(descriptor)
    return Path(name)
