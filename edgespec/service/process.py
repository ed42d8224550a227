"""The engine in a process of its own, so that a screen or a server takes no time from decoding and survives its end.

Python runs one thread of a process at a time. And where a runtime ends its process, as llama.cpp does when an
assertion fails, this process goes on.
"""

from __future__ import annotations

import atexit
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil

from edgespec.backends.devices import DeviceMemory
from edgespec.backends.isolated import block_sigint
from edgespec.controller.stats import DraftStats
from edgespec.engine.drafting import Speculation
from edgespec.engine.embeddings import Embedding
from edgespec.engine.events import Event, Request
from edgespec.errors import BackendError, Cancelled, EdgespecError, reason_of
from edgespec.planner.plan import LoadConfig, Reporter
from edgespec.service.client import EngineClient, ModelInfo
from edgespec.service.local import LocalEngine
from edgespec.service.stream import Stream
from edgespec.text.chat_template import Message

_NAME = "edgespec-engine"
_SEND_EVERY_S = 0.01  # events of faster decoding are sent together
_SLOW_TURN_S = 0.005  # after one that took so long, everything is sent before the next
_CLOSE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class _Call:
    """Call `method` of the EngineClient; its stream is number `number`. Without a method: cancel that stream."""

    number: int
    method: str = ""
    arguments: tuple[Any, ...] = ()
    has_reporter: bool = False


@dataclass(frozen=True, slots=True)
class _Events:
    """Events of a stream; `end` where they are its last."""

    number: int
    events: list[Any]
    end: _End | None = None


@dataclass(frozen=True, slots=True)
class _Report:
    """A call of the Reporter."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _End:
    """`model_info` is left out where it has not changed since the last end."""

    error: BaseException | None
    model_info: ModelInfo | None
    is_model_info_new: bool


@dataclass(frozen=True, slots=True)
class _Pending:
    stream: Stream[Any]
    reporter: Reporter | None


class EngineProcess:
    """An EngineClient. Starts its process at once, and a new one, with no model open, once that has ended.

    One thread reads what the process sends.
    """

    def __init__(self, restart_hint: str = "/model opens a model again.") -> None:
        """`restart_hint` is the next thing to do for a user whose engine has died."""
        self._restart_hint = restart_hint
        self._numbers = count()
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._model_info: ModelInfo | None = None
        self._log = _make_log()
        self._link: Connection | None = None
        self._start()
        atexit.register(self.close)  # before multiprocessing waits for the process

    @property
    def model_info(self) -> ModelInfo | None:
        return self._model_info

    @property
    def resident(self) -> int:
        total = int(psutil.Process().memory_info().rss)
        with suppress(psutil.Error):
            total += psutil.Process(self._process.pid).memory_info().rss
        return total

    def open(self, config: LoadConfig, reporter: Reporter) -> Stream[ModelInfo]:
        return self._call("open", config, reporter=reporter)

    def change_draft(self, config: LoadConfig, reporter: Reporter) -> Stream[ModelInfo]:
        return self._call("change_draft", config, reporter=reporter)

    def stream(self, request: Request, speculation: Speculation | None = None) -> Stream[Event]:
        return self._call("stream", request, speculation)

    def plan(self, config: LoadConfig, reporter: Reporter) -> Stream[str]:
        return self._call("plan", config, reporter=reporter)

    def speculate(self, argument: str) -> Stream[ModelInfo]:
        return self._call("speculate", argument)

    def draft_stats(self) -> Stream[DraftStats | None]:
        return self._call("draft_stats")

    def count(self, prompt: str | tuple[Message, ...], variables: Mapping[str, Any]) -> Stream[int]:
        return self._call("count", prompt, dict(variables))

    def embed(self, texts: Sequence[str | Sequence[int]]) -> Stream[Embedding]:
        return self._call("embed", list(texts))

    def devices(self) -> Stream[tuple[DeviceMemory, ...]]:
        return self._call("devices")

    def close(self) -> None:
        atexit.unregister(self.close)
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            with suppress(OSError):
                link.send(None)
        self._process.join(_CLOSE_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._reader.join()
        self._log.unlink(missing_ok=True)

    def _start(self) -> None:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        with block_sigint():
            self._process: SpawnProcess = context.Process(target=_serve, args=(theirs, self._log), name=_NAME)
            self._process.start()
        theirs.close()  # so that the end of that process is the end of the pipe
        self._link = ours
        self._reader = threading.Thread(target=self._read, args=(ours,), name=_NAME, daemon=True)
        self._reader.start()

    def _call(self, method: str, *arguments: Any, reporter: Reporter | None = None) -> Stream[Any]:
        number = next(self._numbers)
        stream: Stream[Any] = Stream(lambda: self._send(_Call(number)), is_bounded=False)
        with self._lock:
            if self._link is None:
                self._start()
            self._pending[number] = _Pending(stream, reporter)
        try:
            self._send(_Call(number, method, arguments, reporter is not None))
        except BaseException:  # arguments that cannot be pickled
            del self._pending[number]
            raise
        return stream

    def _send(self, call: _Call) -> None:
        with self._lock, suppress(OSError):  # of a process that has died; the reader ends its streams
            if self._link is not None:
                self._link.send(call)

    def _read(self, link: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                message = link.recv()
                pending = self._pending[message.number]
                if isinstance(message, _Report):
                    getattr(pending.reporter, message.method)(*message.arguments)
                    continue
                if (end := message.end) is None:
                    pending.stream.put(*message.events)
                    continue
                if end.is_model_info_new:
                    self._model_info = end.model_info
                del self._pending[message.number]
                pending.stream.end(end.error, *message.events)
        self._process.join()
        with self._lock:
            if self._link is link:
                self._link = None
            self._model_info = None
            abandoned, self._pending = self._pending, {}
        link.close()
        for each in abandoned.values():
            each.stream.end(BackendError(f"the engine's process ended{self._describe_end()}.", hint=self._restart_hint))

    def _describe_end(self) -> str:
        """The exit code or signal, and the last line that the process wrote."""
        code = self._process.exitcode or 0
        reason = f" with {signal.Signals(-code).name}" if code < 0 else f" with code {code}"
        text = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        return f"{reason}: {lines[-1][:200].rstrip('.')}" if lines else reason


# What follows runs in the other process.


def _serve(link: Connection, log: Path) -> None:
    """Run calls until the pipe ends."""
    descriptor = os.open(log, os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):  # the terminal belongs to the parent
        os.dup2(descriptor, stream)
    outbox = _Outbox(link)
    _Server(link, LocalEngine(after_turn=outbox.flush_after_turn), outbox).run()


class _Outbox:
    """What the process sends: the one place that gathers events into messages."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._lock = threading.RLock()
        self._events: dict[int, list[Any]] = {}
        self._model_info: ModelInfo | None = None  # that the parent knows
        self._sent_s = self._turn_s = 0.0

    def put(self, number: int, event: Any) -> None:
        """Add an event of a stream. It is sent now if none was sent lately."""
        with self._lock:
            self._events.setdefault(number, []).append(event)
            if perf_counter() - self._sent_s >= _SEND_EVERY_S:
                self.flush()

    def flush_after_turn(self) -> None:
        """All running jobs have advanced, and the next forward begins."""
        with self._lock:
            now_s = perf_counter()
            turn_s, self._turn_s = now_s - self._turn_s, now_s
            if turn_s >= _SLOW_TURN_S or now_s - self._sent_s >= _SEND_EVERY_S:
                self.flush()

    def end(self, number: int, error: BaseException | None, model_info: ModelInfo | None) -> None:
        """Send the end of a stream with its last events."""
        with self._lock, suppress(OSError):
            is_new, self._model_info = model_info != self._model_info, model_info
            end = _End(error, model_info if is_new else None, is_new)
            self._link.send(_Events(number, self._events.pop(number, []), end))

    def report(self, number: int, method: str, *arguments: Any) -> None:
        """Send a call of the Reporter."""
        with self._lock, suppress(OSError):
            self._link.send(_Report(number, method, arguments))

    def flush(self) -> None:
        with self._lock, suppress(OSError):
            if self._events:
                self._sent_s = perf_counter()
                events, self._events = self._events, {}
                for number, each in events.items():
                    self._link.send(_Events(number, each))


class _Server:
    def __init__(self, link: Connection, client: EngineClient, outbox: _Outbox) -> None:
        self._link = link
        self._client = client
        self._outbox = outbox
        self._streams: dict[int, Stream[Any]] = {}

    def run(self) -> None:
        try:
            while (call := self._link.recv()) is not None:
                if call.method:
                    self._begin(call)
                elif (stream := self._streams.get(call.number)) is not None:
                    stream.cancel()
        except (EOFError, OSError):  # the parent has died
            pass
        finally:
            self._client.close()

    def _begin(self, call: _Call) -> None:
        number = call.number
        arguments = (*call.arguments, _RemoteReporter(number, self._outbox)) if call.has_reporter else call.arguments

        def end(error: BaseException | None) -> None:
            self._streams.pop(number, None)
            self._outbox.end(number, _make_portable(error) if error else None, self._client.model_info)

        stream = self._streams[number] = getattr(self._client, call.method)(*arguments)
        stream.forward(lambda event: self._outbox.put(number, event), end)


class _RemoteReporter:
    """A Reporter that calls the one in the other process."""

    def __init__(self, number: int, outbox: _Outbox) -> None:
        self._number = number
        self._outbox = outbox

    def notice(self, text: str) -> None:
        self._outbox.report(self._number, "notice", text)

    def download(self, name: str, done: int, total: int) -> None:
        self._outbox.report(self._number, "download", name, done, total)

    def loading(self, name: str, fraction: float) -> None:
        self._outbox.report(self._number, "loading", name, fraction)


def _make_portable(error: BaseException) -> BaseException:
    """An error that can be pickled; a bug carries its traceback as a note."""
    if isinstance(error, EdgespecError | Cancelled):
        return error
    bug = RuntimeError(f"{type(error).__name__}: {reason_of(error)}")
    bug.add_note("".join(traceback.format_exception(error)))
    return bug


def _make_log() -> Path:
    descriptor, name = tempfile.mkstemp(prefix="edgespec-engine-", suffix=".log")
    os.close(descriptor)
    return Path(name)
