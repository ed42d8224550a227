"""Events of one piece of work, from the thread that works to a reader."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_UNREAD = 2048  # events that a job may be ahead of its reader
_LOOK_S = 0.5  # Python handles a signal that comes just before a wait, such as that of Ctrl-C, only after it


class Stream(Generic[T]):
    """Events of one piece of work, in order, from a worker thread to one reader: a thread, an event loop or a function.

    Reading raises what the work raised, and Cancelled if the work was cancelled before it began. `cancel` may be called
    from any thread.
    """

    def __init__(self, on_cancel: Callable[[], None] = lambda: None) -> None:
        self.is_cancelled = False
        self._on_cancel = on_cancel
        self._unread: deque[T] = deque()
        self._is_over = False  # with all its events among the unread ones
        self._error: BaseException | None = None
        self._lock = threading.RLock()
        self._notify: Callable[[], None] | None = None  # who waits for events

    def cancel(self) -> None:
        """Ask the work to stop, if it has not ended. It still delivers its last events."""
        if not self._is_over:
            self.is_cancelled = True
            self._on_cancel()

    @property
    def is_full(self) -> bool:
        """Whether work that can wait should: its reader is far behind."""
        return len(self._unread) >= MAX_UNREAD and not self.is_cancelled

    def put(self, *events: T) -> None:
        self._add(events, is_last=False)

    def end(self, error: BaseException | None = None, *events: T) -> None:
        """Add the last events and end the stream; `error` is what the work has raised. To be called once."""
        self._error = error
        self._add(events, is_last=True)

    def __iter__(self) -> Iterator[T]:
        arrived = threading.Event()
        while True:
            is_over = self._is_over
            while self._unread:
                yield self._unread.popleft()
            if is_over:
                return self._raise()
            arrived.clear()
            self._wait_for_events(arrived.set)
            while not arrived.wait(_LOOK_S):
                pass

    async def __aiter__(self) -> AsyncIterator[T]:
        async for batch in self.batches():
            for event in batch:
                yield event

    async def batches(self) -> AsyncIterator[list[T]]:
        """Available events in batches: a reader that is slower than the work gets longer ones."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(arrived.set)

        while True:
            is_over, events = self._is_over, self._take_all()
            if events:
                yield events
            elif is_over:
                self._raise()
                return
            else:
                arrived.clear()
                self._wait_for_events(wake)
                await arrived.wait()

    def forward(self, put: Callable[[Sequence[T]], None], end: Callable[[BaseException | None], None]) -> None:
        """Call `put` and `end` on the thread that works, from now on, instead of keeping events for a reader."""

        def deliver() -> None:
            is_over = self._is_over
            if events := self._take_all():
                put(events)
            if is_over:
                end(self._error)
            else:
                self._wait_for_events(deliver)

        self._wait_for_events(deliver)

    def result(self) -> T:
        """Wait for the only event and return it. Raises what the work raised."""
        (event,) = self
        return event

    async def wait(self) -> T:
        """Await and return the only event. Cancelling the task cancels the stream too."""
        try:
            (event,) = [event async for event in self]
        finally:
            self.cancel()
        return event

    def _add(self, events: Sequence[T], *, is_last: bool) -> None:
        with self._lock:
            self._unread.extend(events)
            self._is_over = is_last
            notify, self._notify = self._notify, None
            if notify is not None:
                notify()

    def _wait_for_events(self, notify: Callable[[], None]) -> None:
        """Have `notify` called once, as soon as there are unread events or the work is over."""
        with self._lock:
            if self._unread or self._is_over:
                notify()
            else:
                self._notify = notify

    def _take_all(self) -> list[T]:
        return [self._unread.popleft() for _ in range(len(self._unread))]

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
