"""The engine in a process of its own, so that a screen or a server takes no time from decoding and survives its end.

Python runs one thread of a process at a time. And where a runtime ends its process, as llama.cpp does when an
assertion fails, this process goes on.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from typing import Any

import psutil

from edgespec.backends.isolated import block_sigint
from edgespec.backends.ranks import get_rank_address
from edgespec.errors import BackendError
from edgespec.planner.plan import Reporter
from edgespec.service.client import EngineClient, ModelInfo, Stream
from edgespec.service.link import Call, Death, EngineLog, Link, Report, Silence, Update
from edgespec.service.process_main import serve

_NAME = "edgespec-engine"
_CLOSE_TIMEOUT_S = 20.0
MAX_SILENCE_S = 60.0
"""Far more than a process needs between two signs of life: it gives them during long forwards and loads too."""
_OPENS_NOTHING = ("open", "plan", "devices")  # calls that need no open model


@dataclass(frozen=True, slots=True)
class _Pending:
    stream: Stream[Any]
    reporter: Reporter | None


class EngineProcess(EngineClient):
    """Starts its process at once, and a new one, with no model open, once that has ended.

    One thread reads what the process sends, and ends a process that says nothing.
    """

    def __init__(
        self,
        restart_hint: str = "/model opens a model again.",
        max_silence_s: float = MAX_SILENCE_S,
        on_death: Callable[[Death], None] = lambda death: None,
    ) -> None:
        """`restart_hint` is the next thing to do for a user whose engine has died.

        `on_death` is called on a thread of this object where the process has ended and nobody closed it.
        """
        self._restart_hint = restart_hint
        self._max_silence_s = max_silence_s
        self._on_death = on_death
        self._death: Death | None = None  # of the last process; while one runs, why this object is ending it
        self._numbers = count()
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._model_info: ModelInfo | None = None
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
            if self._link is not None or self._death is None or self._death.is_told:
                return None
            self._death = replace(self._death, is_told=True)
        return self._describe(self._death)

    def kill(self, reason: str) -> None:
        """End the process now; its streams raise BackendError with `reason`, and the next call starts another one."""
        self._end(Death("stopped", reason, is_asked=True))

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

    def _start(self) -> None:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        log = EngineLog()
        with block_sigint():
            self._process: SpawnProcess = context.Process(
                target=serve, args=(theirs, log.output, get_rank_address()), name=_NAME
            )
            self._process.start()
        theirs.close()  # so that the end of that process is the end of the pipe
        self._death = None
        self._link = Link(ours, self._max_silence_s)
        self._reader = threading.Thread(target=self._read, args=(self._link, log), name=_NAME, daemon=True)
        self._reader.start()

    def _call(self, method: str, *arguments: Any, reporter: Reporter | None = None) -> Stream[Any]:
        number = next(self._numbers)
        stream: Stream[Any] = Stream(lambda: self._send(Call(number)), is_bounded=False)
        with self._lock:
            if self._link is None and self._death is not None and method not in _OPENS_NOTHING:
                stream.end(self._describe(self._death))
                return stream
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

    def _read(self, link: Link, log: EngineLog) -> None:
        try:
            while True:
                self._take(link.receive())
        except Silence:
            self._end(Death("silence", f"the engine said nothing for {self._max_silence_s:g} seconds and was ended"))
        except (EOFError, OSError):
            pass
        self._process.join()
        with self._lock:
            has_died = self._link is link
            death = Death("closed", "the engine was closed", is_asked=True)
            if has_died:
                death = self._death or log.explain(self._process.exitcode or 0)
                self._link, self._death = None, replace(death, is_told=bool(self._pending))
            abandoned, self._pending = self._pending, {}
            self._model_info = None
        link.close()
        log.close()
        if has_died:
            self._on_death(death)
        for each in abandoned.values():
            each.stream.end(self._describe(death))

    def _end(self, death: Death) -> None:
        self._death = death
        self._process.kill()

    def _describe(self, death: Death) -> BackendError:
        return BackendError(f"{death.reason}.", hint=f"{death.hint} {self._restart_hint}".lstrip())

    def _take(self, update: Update) -> None:
        for number, events in update.events.items():
            pending = self._pending[number]
            if pending.reporter is None:
                pending.stream.put(*events)
                continue
            for event in events:
                if isinstance(event, Report):
                    getattr(pending.reporter, event.method)(*event.arguments)
                else:
                    pending.stream.put(event)
        if update.ended is not None:
            if update.model_info is not None:
                (self._model_info,) = update.model_info
            self._pending.pop(update.ended).stream.end(update.error)
