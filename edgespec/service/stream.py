"""A stream of events from a worker thread to one reader: a thread with `for`, or an event loop with `async for`."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_UNREAD = 2048  # events that work may be ahead of its reader
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
        self._is_over = False
        self._on_cancel = on_cancel
        self._is_bounded = is_bounded
        self._events: deque[T | _End] = deque()
        self._changed = threading.Condition()
        self._wake_reader: Callable[[], None] = lambda: None
        self._receive: Callable[[T | _End], None] | None = None

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
        with self._changed:
            while self._is_full and not self.is_cancelled:
                self._changed.wait(_POLL_S)
            self._add(*events)

    def end(self, error: BaseException | None = None, *events: T) -> None:
        """Add the last events. The work is over; once."""
        with self._changed:
            self._is_over = True
            self._add(*events, _End(error))

    # What the reader calls.

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._changed:
                while not self._events:
                    self._changed.wait(_POLL_S)
                event = self._take()
            if isinstance(event, _End):
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

        self._wake_reader = wake
        while True:
            ready.clear()
            events, end = self._take_all()
            if events:
                yield events
            elif end is not None:
                _raise(end)
                return
            else:
                await ready.wait()

    def forward(self, put: Callable[[T], None], end: Callable[[BaseException | None], None]) -> None:
        """Call `put` and `end` on the thread that works, from now on, instead of keeping events for a reader."""

        def receive(event: T | _End) -> None:
            if isinstance(event, _End):
                end(event.error)
            else:
                put(event)

        with self._changed:
            self._receive = receive
            while self._events:
                receive(self._events.popleft())
            self._changed.notify_all()

    def result(self) -> T:
        """The only event."""
        (event,) = self
        return event

    async def wait(self) -> T:
        """The only event, on an event loop."""
        (event,) = [event async for event in self]
        return event

    @property
    def _is_full(self) -> bool:
        return self._is_bounded and len(self._events) >= MAX_UNREAD

    def _add(self, *events: T | _End) -> None:
        if self._receive is not None:
            for event in events:
                self._receive(event)
            return
        was_empty = not self._events
        self._events.extend(events)
        self._changed.notify_all()
        if was_empty:
            self._wake_reader()

    def _take(self) -> T | _End:
        """The next event. The end stays, for the next reader."""
        event = self._events[0]
        if not isinstance(event, _End):
            self._events.popleft()
        self._changed.notify_all()
        return event

    def _take_all(self) -> tuple[list[T], _End | None]:
        with self._changed:
            events = [event for event in self._events if not isinstance(event, _End)]
            last = self._events[-1] if self._events else None
            self._events.clear()
            if isinstance(last, _End):
                self._events.append(last)
            self._changed.notify_all()
        return events, last if isinstance(last, _End) else None


def _raise(end: _End) -> None:
    if end.error is not None:
        raise end.error
