"""The engine in a process of its own, so that a screen or a server takes no time from decoding and survives its end.

Python runs one thread of a process at a time. And where a runtime ends its process, as llama.cpp does when an
assertion fails, this process goes on.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from subprocess import DEVNULL, Popen
from time import perf_counter, sleep
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import psutil

from edgespec.autopilot.store import calibration_folder
from edgespec.client.client import EngineClient
from edgespec.client.stream import Stream
from edgespec.engine.model_info import ModelInfo
from edgespec.errors import BackendError, Cancelled, EdgespecError, InvalidRequest, names_memory, reason_of
from edgespec.files import write_atomically
from edgespec.isolated import block_sigint, python_command
from edgespec.machines.ranks import get_rank_address, set_rank_address
from edgespec.progress import Reporter
from edgespec.text.stream import Piece

if TYPE_CHECKING:
    from edgespec.client.local import LocalEngine

_NAME = "edgespec-engine"
_CLOSE_TIMEOUT_S = 20.0
MAX_SILENCE_S = 60.0
"""Far more than a process needs between two signs of life: it gives them during long forwards and loads too."""

_OPENS_NOTHING = ("open", "devices")  # calls that need no open model


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
        """End the process now; its streams raise BackendError with `reason`, and the next call starts another one."""
        self._end(Death("stopped", reason, is_asked=True))

    def close(self) -> None:
        atexit.unregister(self.close)
        with self._lock:
            link, self._link = self._link, None
            self._death = self._death or _CLOSED
        if link is not None:
            link.send(None)
        self._reader.join(_CLOSE_TIMEOUT_S)  # it waits for the process
        if self._reader.is_alive():
            self._process.kill()
            self._reader.join()

    def _start(self) -> None:
        ours, theirs = Pipe()
        output = tempfile.TemporaryFile(prefix=f"{_NAME}-")  # noqa: SIM115 - `_read` closes it
        command = [*python_command(__name__, "serve_engine"), str(theirs.fileno())]
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
            death = _CLOSED
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


_TICK_S = 0.5


class Link:
    """One end of the pipe between this process and an engine process. `send` from any thread, `receive` from one.

    silent_s  seconds for which the process has said nothing, since its first message. Counted in steps that this
              process has waited, so that none count in which both were stopped
    """

    def __init__(self, connection: Connection, max_silence_s: float) -> None:
        self.silent_s = 0.0
        self._connection = connection
        self._max_silence_s = max_silence_s
        self._has_spoken = False
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="edgespec-link", daemon=True)
        self._sender.start()

    def send(self, message: Any) -> None:
        """Returns at once: a process that is stopped does not read, and a pipe holds little. Raises PicklingError."""
        self._outbox.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def receive(self) -> Any:
        """The next message. Raises TimeoutError after a silence, EOFError or OSError once the process has ended."""
        while not self._connection.poll(_TICK_S):
            self.silent_s += _TICK_S * self._has_spoken
            if self.silent_s >= self._max_silence_s:
                raise TimeoutError
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


class Call(NamedTuple):
    """Call `method` of the EngineClient; its stream is number `number`. Without a method: cancel that stream.

    `arguments` is a pickled tuple: values of classes that a script defines cannot be read in another process.
    """

    number: int
    method: str = ""
    arguments: bytes = b""
    has_reporter: bool = False


class Report(NamedTuple):
    """An event of a stream that is a call of its Reporter."""

    method: str
    arguments: tuple[Any, ...]


class Update(NamedTuple):
    """New events of streams by their numbers, and perhaps the end of one. An empty one is a sign of life: the thread
    that owns the models goes on.

    ended       number of the stream that has ended
    model_info  the engine's at that time
    """

    events: dict[int, list[Any]]
    ended: int | None = None
    error: BaseException | None = None
    model_info: ModelInfo | None = None


_MAX_BYTES = 256 * 1024
_MAX_WORDS = 200
_FAULT = "Fatal Python error: "  # a dump of Python's stacks follows
_TOLD = re.compile(r"^error: (.+)\.\nhint: (.+)$", re.MULTILINE)  # of backends.llamacpp.rpc, before it ends the process
_CAUSE = re.compile(r"GGML_ASSERT|\berror\b|\bfailed\b|\w(Error|Exception)\b|what\(\):|out of memory", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Death:
    """The end of an engine process that nobody had closed.

    cause     for counters: a signal's name, 'exit', 'silence', 'message', 'stopped' or 'worker'
    reason    a clause for people, without a full stop
    is_asked  whether it was ended on request
    log       the file that keeps the output; None if there was none
    hint      what to do before the model is opened again, as a sentence; "" for nothing
    """

    cause: str
    reason: str
    is_asked: bool = False
    log: Path | None = None
    hint: str = ""


_CLOSED = Death("closed", "the model has been closed", is_asked=True)


def explain(exit_code: int, output: IO[bytes]) -> Death:
    """Why an engine process has ended, with its last words. What it has written to `output` is kept in `last_log()`."""
    output.seek(max(0, os.fstat(output.fileno()).st_size - _MAX_BYTES))
    text, log = output.read().decode("utf-8", "replace"), None
    with suppress(OSError):
        if text.strip():
            last_log().parent.mkdir(parents=True, exist_ok=True)
            write_atomically(last_log(), text)
            log = last_log()
    if exit_code == BackendError.exit_code and (told := _TOLD.findall(text)):
        reason, hint = told[-1]
        return Death("worker", reason[0].lower() + reason[1:], log=log, hint=hint)
    name, words = "", find_last_words(text)
    with suppress(ValueError):  # a real-time signal has no name
        name = signal.Signals(-exit_code).name if exit_code < 0 else ""
    hint = "The system kills processes when memory runs out." if name == "SIGKILL" else ""
    if names_memory(words):
        hint = "Memory ran out: close other programs, or use a smaller --ctx or fewer --gpu-layers."
    end = f"{name or f'code {exit_code}'}{words and ': '}{words}"
    return Death(name or "exit", f"the engine's process ended with {end}", log=log, hint=hint)


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


_BEAT_S = 1.0
_SEND_EVERY_S = 0.01  # the events of shorter turns are sent together


def serve_engine() -> None:
    """Run calls from the pipe whose descriptor is this process's first argument, until it ends."""
    from edgespec.client.local import LocalEngine  # the parent imports this module too, and needs no engine

    faulthandler.enable(all_threads=False)  # reading the stack of a thread that runs can fault, and hide the signal
    link = Connection(int(sys.argv[1]))
    os.set_inheritable(link.fileno(), False)
    outbox = Outbox(link)
    client = LocalEngine(after_turn=outbox.flush_after_turn, uses_idle_time=True)
    threading.Thread(target=_beat, args=(outbox, client), name="edgespec-beat", daemon=True).start()
    streams: dict[int, Stream[Any]] = {}
    try:
        set_rank_address(link.recv())
        while (call := link.recv()) is not None:
            if call.method:
                _begin(call, client, outbox, streams)
            elif (stream := streams.get(call.number)) is not None:
                stream.cancel()
    except (EOFError, OSError):  # the parent has died
        pass
    finally:
        client.close()


def _begin(call: Call, client: LocalEngine, outbox: Outbox, streams: dict[int, Stream[Any]]) -> None:
    number, takes_turns = call.number, call.method == "stream"

    def put(events: Sequence[Any]) -> None:
        outbox.put(number, events, takes_turns=takes_turns)

    def end(error: BaseException | None) -> None:
        streams.pop(number, None)
        outbox.flush(number, _make_portable(error) if error else None, client.model_info)

    try:
        arguments = pickle.loads(call.arguments)
    except Exception as error:  # noqa: BLE001 - such as AttributeError for a class of a script
        hint = "Use Python's own types."
        end(InvalidRequest(f"an argument cannot be sent to the engine's process: {reason_of(error)}.", hint=hint))
        return
    reporter = _RemoteReporter(put) if call.has_reporter else None
    stream = streams[number] = client.call(call.method, *arguments, reporter=reporter)
    stream.forward(put, end)


def _beat(outbox: Outbox, client: LocalEngine) -> None:
    """Tell every second that this process lives, unless the thread that owns the models has given no sign since."""
    while True:
        if client.silent_s < _BEAT_S:
            outbox.flush()
        sleep(_BEAT_S)


class Outbox:
    """What the process sends: the one place that gathers events into messages, one for all streams.

    Every message wakes the other process, and takes both some of the time for a fast model's token.
    """

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._lock = threading.RLock()
        self._events: dict[int, list[Any]] = {}
        self._sent_s = 0.0  # when text was sent last

    def put(self, number: int, events: Sequence[Any], *, takes_turns: bool) -> None:
        """Add events of a stream. They are sent now, unless it takes turns: then after this or a later one."""
        with self._lock:
            self._events.setdefault(number, []).extend(events)
            if not takes_turns:
                self.flush()

    def flush_after_turn(self) -> None:
        """All running jobs have advanced, and the next forward begins. Text that soon follows text waits for more."""
        with self._lock:
            if self._events and perf_counter() - self._sent_s >= _SEND_EVERY_S:
                if any(isinstance(event, Piece) for events in self._events.values() for event in events):
                    self._sent_s = perf_counter()
                self.flush()

    def flush(self, *end: Any) -> None:
        """Send the events, if only as a sign of life, and the end of a stream: its number, error and the model."""
        with self._lock:
            message = Update(self._events, *end)
            self._events = {}
            with suppress(OSError):  # the parent has died
                self._link.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


class _RemoteReporter:
    """A Reporter whose calls are events of a stream."""

    def __init__(self, put: Callable[[Sequence[Any]], None]) -> None:
        self._put = put

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *arguments: self._put([Report(method, arguments)])


def _make_portable(error: BaseException) -> BaseException:
    """An error that can be pickled; a bug carries its traceback as a note."""
    if isinstance(error, EdgespecError | Cancelled):
        return error
    bug = RuntimeError(f"{type(error).__name__}: {reason_of(error)}")
    bug.add_note("".join(traceback.format_exception(error)))
    return bug
