"""The engine process: it runs the calls that arrive, and sends what comes of them."""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from edgespec.client.link import Call, Report, Update
from edgespec.client.stream import Stream
from edgespec.errors import Cancelled, EdgespecError, InvalidRequest, reason_of
from edgespec.machines.ranks import set_rank_address
from edgespec.text.stream import Piece

if TYPE_CHECKING:
    from edgespec.client.local import LocalEngine

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
    """Gathers the events of all streams into messages, which it sends to the other process.

    Every message wakes the other process. It takes both processes a part of the time in which a fast model computes a
    token, so there are as few as possible.
    """

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._lock = threading.RLock()
        self._events: dict[int, list[Any]] = {}
        self._begun: set[int] = set()  # streams whose first text was sent
        self._sent_s = 0.0  # when text was sent last

    def put(self, number: int, events: Sequence[Any], *, takes_turns: bool) -> None:
        """Add events of a stream. They are sent now; those of a stream that takes turns are sent after its turn, or a
        later one.
        """
        with self._lock:
            self._events.setdefault(number, []).extend(events)
            if not takes_turns:
                self.flush()

    def flush_after_turn(self) -> None:
        """Send the events once all running jobs have advanced and the next forward begins. Text that soon follows other
        text waits for more, except for the first text of a stream.
        """
        with self._lock:
            is_due = perf_counter() - self._sent_s >= _SEND_EVERY_S
            if not self._events or not (is_due or self._events.keys() - self._begun):
                return
            speaking = {n for n, events in self._events.items() if any(isinstance(each, Piece) for each in events)}
            if is_due or not speaking <= self._begun:
                if speaking:
                    self._sent_s = perf_counter()
                self._begun |= speaking
                self.flush()

    def flush(self, *end: Any) -> None:
        """Send the events, if only as a sign of life, and the end of a stream: its number, error and the model."""
        with self._lock:
            self._begun -= set(end[:1])
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
