"""The engine process: runs the calls that arrive, and sends the events of their streams."""

from __future__ import annotations

import faulthandler
import pickle
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from edgespec.backends.ranks import RankAddress, set_rank_address
from edgespec.errors import Cancelled, EdgespecError, reason_of
from edgespec.service.client import ModelInfo, Stream
from edgespec.service.link import Call, Output, Report, Update
from edgespec.text.stream import Piece

if TYPE_CHECKING:
    from edgespec.service.local import LocalEngine

_BEAT_S = 1.0
_SLOW_S = 0.005  # the events of a turn that takes so long are sent at once
_SEND_EVERY_S = 0.01  # those of shorter turns are sent together


def serve(link: Connection, output: Output, address: RankAddress | None) -> None:
    """Run calls until the pipe ends. What this process prints goes to `output`; other ranks come to `address`."""
    from edgespec.service.local import LocalEngine  # the parent imports this module too, and needs no engine

    output.redirect()  # the terminal belongs to the parent
    faulthandler.enable(all_threads=False)  # reading the stack of a thread that runs can fault, and hide the signal
    set_rank_address(address)
    outbox = Outbox(link)
    client = LocalEngine(after_turn=outbox.flush_after_turn, uses_idle_time=True)
    threading.Thread(target=_beat, args=(outbox, client), name="edgespec-beat", daemon=True).start()
    streams: dict[int, Stream[Any]] = {}
    try:
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
        outbox.end(number, _make_portable(error) if error else None, client.model_info)

    arguments = (*call.arguments, _RemoteReporter(put)) if call.has_reporter else call.arguments
    stream = streams[number] = getattr(client, call.method)(*arguments)
    stream.forward(put, end)


def _beat(outbox: Outbox, client: LocalEngine) -> None:
    """Tell every second that this process lives, unless the thread that owns the models has given no sign since."""
    while True:
        if client.silent_s < _BEAT_S:
            outbox.beat()
        sleep(_BEAT_S)


class Outbox:
    """What the process sends: the one place that gathers events into messages, one for all streams.

    Every message wakes the other process, and takes both some of the time for a fast model's token.
    """

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._lock = threading.RLock()
        self._events: dict[int, list[Any]] = {}
        self._talking: set[int] = set()  # streams whose text has begun
        self._model_info: ModelInfo | None = None  # that the parent knows
        self._sent_s = self._turn_s = 0.0
        self._is_urgent = False  # whether a text begins

    def put(self, number: int, events: Sequence[Any], *, takes_turns: bool) -> None:
        """Add events of a stream. They are sent now, unless it takes short turns: then after this or a later one."""
        with self._lock:
            self._events.setdefault(number, []).extend(events)
            if number not in self._talking and any(isinstance(event, Piece) for event in events):
                self._talking.add(number)
                self._is_urgent = True
            if not takes_turns or perf_counter() - max(self._sent_s, self._turn_s) >= _SLOW_S:
                self._flush()

    def flush_after_turn(self) -> None:
        """All running jobs have advanced, and the next forward begins."""
        with self._lock:
            now_s = perf_counter()
            is_slow, self._turn_s = now_s - self._turn_s >= _SLOW_S, now_s
            if self._events and (self._is_urgent or is_slow or now_s - self._sent_s >= _SEND_EVERY_S):
                self._flush()

    def end(self, number: int, error: BaseException | None, model_info: ModelInfo | None) -> None:
        """Send the end of a stream, after all events that were put."""
        with self._lock:
            self._talking.discard(number)
            changed = None if model_info == self._model_info else (model_info,)
            self._model_info = model_info
            self._flush(number, error, changed)

    def beat(self) -> None:
        """Send a sign of life."""
        with self._lock:
            self._flush()

    def _flush(self, *end: Any) -> None:
        """Send the events, and the end of a stream: its number, error and the model, as an Update has them."""
        message = Update(self._events, *end)
        self._events, self._sent_s, self._is_urgent = {}, perf_counter(), False
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
