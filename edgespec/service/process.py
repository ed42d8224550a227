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
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import psutil

from edgespec.backends.devices import DeviceMemory
from edgespec.backends.isolated import block_sigint
from edgespec.controller.stats import DraftStats
from edgespec.engine.drafting import Speculation
from edgespec.engine.embeddings import Embedding
from edgespec.engine.events import Event, Prompt, Request
from edgespec.errors import BackendError
from edgespec.planner.plan import LoadConfig, Reporter
from edgespec.service.client import ModelInfo
from edgespec.service.link import Link, Silence
from edgespec.service.messages import Beat, Call, Events, Report
from edgespec.service.process_main import serve
from edgespec.service.stream import Stream

_NAME = "edgespec-engine"
_CLOSE_TIMEOUT_S = 20.0
MAX_SILENCE_S = 60.0
"""Far more than a process needs between two signs of life: it gives them during long forwards and loads too."""
_LOG_PREFIX = "edgespec-engine-"
_MAX_LOG_AGE_S = 86_400.0


@dataclass(frozen=True, slots=True)
class _Pending:
    stream: Stream[Any]
    reporter: Reporter | None


class EngineProcess:
    """An EngineClient. Starts its process at once, and a new one, with no model open, once that has ended.

    One thread reads what the process sends, and ends a process that says nothing.
    """

    def __init__(
        self,
        restart_hint: str = "/model opens a model again.",
        max_silence_s: float = MAX_SILENCE_S,
        on_death: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`restart_hint` is the next thing to do for a user whose engine has died.

        `on_death` is called on a thread of this object, with the reason, where the process has ended and nobody closed
        it.
        """
        self._restart_hint = restart_hint
        self._max_silence_s = max_silence_s
        self._on_death = on_death
        self._ended_for = ""  # why this object ended the process; after its end, what `take_failure` tells
        self._numbers = count()
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._model_info: ModelInfo | None = None
        self._log = _make_log()
        self._link: Link | None = None
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

    @property
    def silent_s(self) -> float:
        """Seconds for which the process has given no sign of life; near 0 in a sound one."""
        link = self._link
        return link.silent_s if link is not None else 0.0

    def take_failure(self) -> BackendError | None:
        with self._lock:
            if self._link is not None or not self._ended_for:
                return None
            reason, self._ended_for = self._ended_for, ""
        return BackendError(f"{reason}.", hint=self._restart_hint)

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

    def count(self, prompt: Prompt, variables: Mapping[str, Any]) -> Stream[int]:
        return self._call("count", prompt, dict(variables))

    def embed(self, texts: Sequence[str | Sequence[int]]) -> Stream[Embedding]:
        return self._call("embed", list(texts))

    def devices(self) -> Stream[tuple[DeviceMemory, ...]]:
        return self._call("devices")

    def kill(self, reason: str) -> None:
        """End the process now; its streams raise BackendError with `reason`, and the next call starts another one."""
        self._ended_for = reason
        self._process.kill()

    def close(self) -> None:
        atexit.unregister(self.close)
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
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
            self._process: SpawnProcess = context.Process(target=serve, args=(theirs, self._log), name=_NAME)
            self._process.start()
        theirs.close()  # so that the end of that process is the end of the pipe
        self._ended_for = ""
        self._link = Link(ours, self._max_silence_s)
        self._reader = threading.Thread(target=self._read, args=(self._link,), name=_NAME, daemon=True)
        self._reader.start()

    def _call(self, method: str, *arguments: Any, reporter: Reporter | None = None) -> Stream[Any]:
        number = next(self._numbers)
        stream: Stream[Any] = Stream(lambda: self._send(Call(number)), is_bounded=False)
        with self._lock:
            if self._link is None:
                self._start()
            self._pending[number] = _Pending(stream, reporter)
        try:
            self._send(Call(number, method, arguments, reporter is not None))
        except BaseException:  # arguments that cannot be pickled
            del self._pending[number]
            raise
        return stream

    def _send(self, call: Call) -> None:
        with self._lock:
            if self._link is not None:
                self._link.send(call)

    def _read(self, link: Link) -> None:
        try:
            while True:
                self._take(link.receive())
        except Silence:
            self.kill(f"the engine said nothing for {self._max_silence_s:g} seconds and was ended")
        except (EOFError, OSError):
            pass
        self._process.join()
        reason = self._ended_for or f"the engine's process ended{self._describe_end()}"
        with self._lock:
            has_died = self._link is link
            if has_died:
                self._link = None
            self._model_info = None
            abandoned, self._pending = self._pending, {}
            self._ended_for = reason if has_died and not abandoned else ""
        link.close()
        if has_died:
            self._on_death(reason)
        for each in abandoned.values():
            each.stream.end(BackendError(f"{reason}.", hint=self._restart_hint))

    def _take(self, message: Beat | Report | Events) -> None:
        if isinstance(message, Beat):
            return
        pending = self._pending[message.number]
        if isinstance(message, Report):
            getattr(pending.reporter, message.method)(*message.arguments)
        elif (end := message.end) is None:
            pending.stream.put(*message.events)
        else:
            if end.is_model_info_new:
                self._model_info = end.model_info
            del self._pending[message.number]
            pending.stream.end(end.error, *message.events)

    def _describe_end(self) -> str:
        """The exit code or signal, and the last line that the process wrote."""
        code = self._process.exitcode or 0
        reason = f" with {signal.Signals(-code).name}" if code < 0 else f" with code {code}"
        text = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        return f"{reason}: {lines[-1][:200].rstrip('.')}" if lines else reason


def _make_log() -> Path:
    """A new file in the temporary folder; those that killed programs have left there are removed after a day."""
    descriptor, name = tempfile.mkstemp(prefix=_LOG_PREFIX, suffix=".log")
    os.close(descriptor)
    for old in Path(name).parent.glob(f"{_LOG_PREFIX}*.log"):
        with suppress(OSError):  # another user's
            if old.stat().st_mtime < time.time() - _MAX_LOG_AGE_S:
                old.unlink()
    return Path(name)
