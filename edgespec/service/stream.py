"""A stream of events from a worker thread to one reader: a thread with `for`, or an event loop with `async for`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import sleep
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_UNREAD = 2048  # events that work may be ahead of its reader
_BACKOFF_S = 0.005
_POLL_S = 0.1  # waits are cut into these, so that Ctrl-C and cancellation are seen on every platform


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


class Stream(Generic[T]):
    """Events of one piece of work, in order. One reader; `cancel` may be called from any thread.

    Reading raises what the work raised, and Cancelled if the work was cancelled before it began.
    """

    def __init__(self, on_cancel: Callable[[], None] | None = None, *, is_bounded: bool = True) -> None:
        """`on_cancel` is called on cancellation. `put` waits for the reader of a bounded stream, and of no other."""
        self.is_cancelled = False
        self._on_cancel = on_cancel
        self._is_bounded = is_bounded
        self._is_over = False
        self._events: SimpleQueue[T | _End] = SimpleQueue()
        self._lock = threading.Lock()  # of the switch from the queue to `_receive`
        self._receive: Callable[[Sequence[T], _End | None], None] | None = None
        self._wake_reader: Callable[[], None] | None = None  # of an event loop, while it may be waiting

    @staticmethod
    def of(produce: Callable[[], T]) -> Stream[T]:
        """A stream that has ended: the result of `produce`, or the error that it raised."""
        stream: Stream[T] = Stream()
        try:
            stream.put(produce())
        except Exception as error:  # noqa: BLE001 - reading raises it
            stream.end(error)
        else:
            stream.end()
        return stream

    def cancel(self) -> None:
        """Ask the work to stop, if it has not ended. It still delivers its last events."""
        if not self._is_over:
            self.is_cancelled = True
            if self._on_cancel is not None:
                self._on_cancel()

    # What the work calls.

    def put(self, *events: T) -> None:
        """Add events. Waits while too many are unread, unless the stream is cancelled."""
        while self._is_full and not self.is_cancelled:
            sleep(_BACKOFF_S)
        self._add(events)

    def end(self, error: BaseException | None = None, *events: T) -> None:
        """Add the last events. The work is over; once."""
        self._is_over = True
        self._add(events, _End(error))

    # What the reader calls.

    def __iter__(self) -> Iterator[T]:
        while True:
            try:
                event = self._events.get(timeout=_POLL_S)
            except Empty:
                continue
            if isinstance(event, _End):
                self._events.put(event)  # for the next reader
                _raise(event)
                return
            yield event

    async def __aiter__(self) -> AsyncIterator[T]:
        async for batch in self.batches():
            for event in batch:
                yield event

    async def batches(self) -> AsyncIterator[list[T]]:
        """Available events in batches: a reader that is slower than the work gets longer ones."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(ready.set)

        while True:
            ready.clear()
            with self._lock:
                self._wake_reader = wake
            events, end = self._take_all()
            if events:
                yield events
            elif end is not None:
                _raise(end)
                return
            else:
                await ready.wait()

    def forward(self, put: Callable[[Sequence[T]], None], end: Callable[[BaseException | None], None]) -> None:
        """Call `put` and `end` on the thread that works, from now on, instead of keeping events for a reader."""

        def receive(events: Sequence[T], last: _End | None) -> None:
            if events:
                put(events)
            if last is not None:
                end(last.error)

        with self._lock:
            self._receive = receive
            receive(*self._take_all())

    def result(self) -> T:
        """The only event."""
        (event,) = self
        return event

    async def wait(self) -> T:
        """The only event, on an event loop. A task that is cancelled here cancels the stream."""
        try:
            (event,) = [event async for event in self]
        finally:
            self.cancel()
        return event

    @property
    def _is_full(self) -> bool:
        return self._is_bounded and self._events.qsize() >= MAX_UNREAD

    def _add(self, events: Sequence[T], end: _End | None = None) -> None:
        with self._lock:
            if self._receive is not None:
                self._receive(events, end)
            else:
                for event in events:
                    self._events.put(event)
                if end is not None:
                    self._events.put(end)
            wake, self._wake_reader = self._wake_reader, None
        if wake is not None:
            wake()

    def _take_all(self) -> tuple[list[T], _End | None]:
        """All events that are there, and the end if it is. The end stays, for the next reader."""
        events: list[T] = []
        with suppress(Empty):
            while not isinstance(event := self._events.get_nowait(), _End):
                events.append(event)
            self._events.put(event)
            return events, event
        return events, None


def _raise(end: _End) -> None:
    if end.error is not None:
        raise end.error
