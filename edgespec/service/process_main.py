"""The engine process: runs the calls that arrive, and sends the events of their streams."""

from __future__ import annotations

import faulthandler
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from edgespec.errors import Cancelled, EdgespecError, reason_of
from edgespec.service.client import EngineClient, ModelInfo
from edgespec.service.engine_log import Output
from edgespec.service.messages import Beat, Call, End, Events, Report
from edgespec.service.stream import Stream

if TYPE_CHECKING:
    from edgespec.service.local import LocalEngine

_BEAT_S = 1.0
_SEND_EVERY_S = 0.01  # events of faster decoding are sent together
_SLOW_TURN_S = 0.005  # after one that took so long, everything is sent before the next


def serve(link: Connection, output: Output) -> None:
    """Run calls until the pipe ends. What this process prints goes to `output`."""
    from edgespec.service.local import LocalEngine  # the parent imports this module too, and needs no engine

    output.redirect()  # the terminal belongs to the parent
    faulthandler.enable()
    outbox = _Outbox(link)
    client = LocalEngine(after_turn=outbox.flush_after_turn)
    threading.Thread(target=_beat, args=(outbox, client), name="edgespec-beat", daemon=True).start()
    _Server(link, client, outbox).run()


def _beat(outbox: _Outbox, client: LocalEngine) -> None:
    """Tell every second that this process lives, unless the thread that owns the models has given no sign since."""
    while True:
        if client.silent_s < _BEAT_S:
            outbox.beat()
        sleep(_BEAT_S)


class _Outbox:
    """What the process sends: the one place that gathers events into messages."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._lock = threading.RLock()
        self._events: dict[int, list[Any]] = {}
        self._model_info: ModelInfo | None = None  # that the parent knows
        self._sent_s = self._turn_s = 0.0
        self._is_slow = True  # whether the last turn was

    def put(self, number: int, event: Any) -> None:
        """Add an event of a stream. It is sent now, unless decoding is fast and something was sent lately."""
        with self._lock:
            self._events.setdefault(number, []).append(event)
            if self._is_slow or perf_counter() - self._sent_s >= _SEND_EVERY_S:
                self.flush()

    def flush_after_turn(self) -> None:
        """All running jobs have advanced, and the next forward begins."""
        with self._lock:
            now_s = perf_counter()
            self._is_slow, self._turn_s = now_s - self._turn_s >= _SLOW_TURN_S, now_s
            if self._is_slow or now_s - self._sent_s >= _SEND_EVERY_S:
                self.flush()

    def end(self, number: int, error: BaseException | None, model_info: ModelInfo | None) -> None:
        """Send the end of a stream with its last events."""
        with self._lock, suppress(OSError):
            is_new, self._model_info = model_info != self._model_info, model_info
            end = End(error, model_info if is_new else None, is_new)
            self._link.send(Events(number, self._events.pop(number, []), end))

    def report(self, number: int, method: str, *arguments: Any) -> None:
        """Send a call of the Reporter."""
        with self._lock, suppress(OSError):
            self._link.send(Report(number, method, arguments))

    def beat(self) -> None:
        """Send a sign of life."""
        with self._lock, suppress(OSError):
            self._link.send(Beat())

    def flush(self) -> None:
        with self._lock, suppress(OSError):
            if self._events:
                self._sent_s = perf_counter()
                events, self._events = self._events, {}
                for number, each in events.items():
                    self._link.send(Events(number, each))


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

    def _begin(self, call: Call) -> None:
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
