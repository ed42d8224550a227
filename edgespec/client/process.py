"""The engine in a process of its own, so that a screen or a server takes no time from decoding and survives its end.

Python runs one thread of a process at a time. And if a runtime ends its process, as llama.cpp does when an
assertion fails, this process goes on.
"""

from __future__ import annotations

import atexit
import pickle
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Pipe
from subprocess import DEVNULL, Popen
from typing import IO, Any

import psutil

from edgespec.client.client import EngineClient
from edgespec.client.death import CLOSED, Death, explain
from edgespec.client.link import Call, Link, Report, Update
from edgespec.client.stream import Stream
from edgespec.engine.model_info import ModelInfo
from edgespec.errors import BackendError, reason_of
from edgespec.isolated import block_sigint, python_command
from edgespec.machines.ranks import get_rank_address
from edgespec.progress import Reporter

_NAME = "edgespec-engine"
_CLOSE_TIMEOUT_S = 20.0
MAX_SILENCE_S = 60.0
"""Far more than a process needs between two signs of life: it gives them during long forwards and loads too."""
_OPENS_NOTHING = ("open", "devices")  # calls that need no open model


class EngineProcess(EngineClient):
    """Runs the engine in a process, which it starts at once. After that has ended, the next `open` or `devices` starts
    a new one, with no model open.

    One thread reads what the process sends, and ends a process that says nothing.
    """

    def __init__(
        self,
        restart_hint: str = "/model opens a model again.",
        max_silence_s: float = MAX_SILENCE_S,
        on_death: Callable[[Death], None] = lambda death: None,
    ) -> None:
        """`restart_hint` is the next thing to do for a user whose engine has died.

        `on_death` is called on a thread of this object if the process has ended and nobody closed it.
        """
        self._restart_hint = restart_hint
        self._max_silence_s = max_silence_s
        self._on_death = on_death
        self._death: Death | None = None  # of the last process; while one runs, why this object is ending it
        self._untold: BackendError | None = None  # of an end that no stream has told
        self._numbers = count()
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[Stream[Any], Reporter | None]] = {}
        self._model_info: ModelInfo | None = None
        self._link: Link | None = None
        self._start()
        atexit.register(self.close)

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
        return link.silent_s if (link := self._link) is not None else 0.0

    def take_failure(self) -> BackendError | None:
        with self._lock:
            failure, self._untold = self._untold, None
        return failure

    def kill(self, reason: str) -> None:
        """End the process now. Its streams raise BackendError with `reason`, and so do other calls until a new one is
        started.
        """
        self._end(Death("stopped", reason, is_asked=True))

    def close(self) -> None:
        atexit.unregister(self.close)
        with self._lock:
            link, self._link = self._link, None
            self._death = self._death or CLOSED
        if link is not None:
            link.send(None)
        self._reader.join(_CLOSE_TIMEOUT_S)  # it waits for the process
        if self._reader.is_alive():
            self._process.kill()
            self._reader.join()

    def _start(self) -> None:
        ours, theirs = Pipe()
        output = tempfile.TemporaryFile(prefix=f"{_NAME}-")  # noqa: SIM115 - `_read` closes it
        command = [*python_command("edgespec.client.child", "serve_engine"), str(theirs.fileno())]
        with theirs, block_sigint():  # it is closed here, so that the end of that process is the end of the pipe
            self._process = Popen(command, stdin=DEVNULL, stdout=output, stderr=output, pass_fds=[theirs.fileno()])
        self._death = self._untold = None
        self._link = Link(ours, self._max_silence_s)
        self._link.send(get_rank_address())
        self._reader = threading.Thread(target=self._read, args=(self._link, output), name=_NAME, daemon=True)
        self._reader.start()

    def call(self, method: str, *arguments: Any, reporter: Reporter | None = None) -> Stream[Any]:
        number = next(self._numbers)
        stream: Stream[Any] = Stream(lambda: self._send(Call(number)))
        with self._lock:
            if self._link is None and self._death is not None and method not in _OPENS_NOTHING:
                stream.end(self._describe(self._death))
                return stream
            if self._link is None:
                self._start()
            self._pending[number] = stream, reporter
        try:
            data = pickle.dumps(arguments, pickle.HIGHEST_PROTOCOL)
            self._send(Call(number, method, data, reporter is not None))
        except BaseException:  # arguments that cannot be pickled
            self._pending.pop(number, None)  # the process may have ended meanwhile
            raise
        return stream

    def _send(self, call: Call) -> None:
        with self._lock:
            if self._link is not None:
                self._link.send(call)

    def _receive(self, link: Link) -> Any:
        """The next message of the process; None at its end."""
        try:
            return link.receive()
        except TimeoutError:
            self._end(Death("silence", f"the engine said nothing for {self._max_silence_s:g} seconds and was ended"))
        except (EOFError, OSError):
            pass
        return None

    def _read(self, link: Link, output: IO[bytes]) -> None:
        try:
            while (message := self._receive(link)) is not None:
                self._take(message)
        except Exception as error:  # noqa: BLE001 - of a message or a Reporter; nobody is to wait for this thread
            self._end(Death("message", f"what the engine said could not be taken: {reason_of(error)}"))
        self._process.wait()
        with self._lock:
            has_died = self._link is link
            death = CLOSED
            abandoned, self._pending = self._pending, {}
            self._model_info = None
            if has_died:
                death = self._death or explain(self._process.returncode, output)
                self._link, self._death = None, death
                self._untold = None if abandoned else self._describe(death)
        link.close()
        output.close()
        if has_died:
            self._on_death(death)
        for stream, _ in abandoned.values():
            stream.end(self._describe(death))

    def _end(self, death: Death) -> None:
        self._death = death
        self._process.kill()

    def _describe(self, death: Death) -> BackendError:
        return BackendError(f"{death.reason}.", hint=f"{death.hint} {self._restart_hint}".lstrip())

    def _take(self, update: Update) -> None:
        for number, events in update.events.items():
            stream, reporter = self._pending[number]
            for event in events:
                if isinstance(event, Report):
                    getattr(reporter, event.method)(*event.arguments)
            stream.put(*(event for event in events if not isinstance(event, Report)))
        if update.ended is not None:
            self._model_info = update.model_info
            self._pending.pop(update.ended)[0].end(update.error)
