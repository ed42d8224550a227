"""One thread owns the models: jobs run on it, some of them at once, taking turns; events cross a bounded queue."""

from __future__ import annotations

import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import sleep
from typing import Generic, TypeVar

from edgespec.backends import leave_thread
from edgespec.core.batching import Yield
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import Cancelled

T = TypeVar("T")

_EVENTS_AHEAD = 2048  # how far generation may run ahead of whoever reads it
# Some of llama.cpp's pre-tokenizers recurse for every character of a word; only what is touched takes memory.
_STACK_BYTES = 512 * 2**20
_POLL_S = 0.1  # waits are cut into these, so that Ctrl-C and cancellation are seen on every platform


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


class Job(Generic[T]):
    """The events of one piece of work, in order. Iterate it from any one thread; `cancel` from any."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Ask the work to stop; it still delivers what it has to say about that."""
        self._cancelled.set()

    def __iter__(self) -> Iterator[T]:
        """Events until the work ends. Raises what the work raised; Cancelled if it was cancelled before it began."""
        while True:
            try:
                event = self._take(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(event, _End):
                if event.error is not None:
                    raise event.error
                return
            yield event

    def batches(self, seconds: float) -> Iterator[list[T]]:
        """The same in lists: what came within `seconds` of the first, so that a reader is woken only so often."""
        for event in self:
            batch = [event]
            sleep(seconds)
            with suppress(queue.Empty):
                while not isinstance(last := self._take(timeout=0), _End):
                    batch.append(last)
                self._events.put(last)  # nothing comes after it
            yield batch

    def put(self, event: T) -> None:
        """What the work has to say next."""
        self._events.put(event)

    def end(self, error: BaseException | None = None) -> None:
        """The work is over; once."""
        self._events.put(_End(error))

    def _take(self, *, timeout: float) -> T | _End:
        return self._events.get(timeout=timeout) if timeout else self._events.get_nowait()


class _Task(Job[T]):
    """A job of this process, which runs ahead of its reader only so far."""

    def __init__(self, work: Callable[[CheckCancelled], Iterator[T | Yield]], *, shares: bool) -> None:
        super().__init__()
        self._work = work
        self._events_left: Iterator[T | Yield] | None = None
        self._room = threading.Semaphore(_EVENTS_AHEAD)
        self.shares = shares

    def go_on(self) -> bool:
        """Do the work up to its next pause, on the owner thread; whether there is more."""
        try:
            if self._events_left is None:
                self._events_left = self._work(self._check)
            for event in self._events_left:
                if isinstance(event, Yield):
                    return True
                self.put(event)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the reader has to hear of it
            self.end(error)
        else:
            self.end()
        return False

    def put(self, event: T) -> None:
        """Wait for room; once cancelled the few last events go beyond the bound, so that nobody waits for a reader."""
        while not self._room.acquire(timeout=_POLL_S):
            if self._cancelled.is_set():
                break
        super().put(event)

    def _take(self, *, timeout: float) -> T | _End:
        event = super()._take(timeout=timeout)
        self._room.release()
        return event

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled


class Worker:
    """The thread that models are loaded, used and freed on."""

    def __init__(self) -> None:
        self.max_concurrency = 1  # of the jobs that share the thread; to be changed on it
        self._tasks: queue.Queue[_Task[object] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, name="edgespec-worker", daemon=True)
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._thread.start()
        finally:
            threading.stack_size(before)

    def submit(self, work: Callable[[CheckCancelled], Iterator[T | Yield]], *, shares: bool = False) -> Job[T]:
        """Queue `work`; it is given the cancellation check to poll. Where it `shares` the thread, others that do may
        begin before it has ended, and go on whenever it pauses.
        """
        task = _Task(work, shares=shares)
        self._tasks.put(task)  # type: ignore[arg-type]  # the queue does not look at the events
        return task

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the owner thread and wait for its result. Raises what it raises."""

        def once(_check: CheckCancelled) -> Iterator[T]:
            yield function()

        (result,) = self.submit(once)
        return result

    def close(self) -> None:
        """Finish the queued jobs and end the thread."""
        self._tasks.put(None)
        self._thread.join()

    def _serve(self) -> None:
        if hasattr(signal, "pthread_sigmask"):  # Ctrl-C is the main thread's, even while that waits in a system call
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._take_turns()
        finally:
            leave_thread()

    def _take_turns(self) -> None:
        waiting: deque[_Task[object] | None] = deque()
        running: list[_Task[object]] = []
        while True:
            if not waiting and not running:
                waiting.append(self._tasks.get())
            with suppress(queue.Empty):
                while True:
                    waiting.append(self._tasks.get_nowait())
            while waiting and self._fits(waiting[0], running):
                task = waiting.popleft()
                if task is None:
                    return
                running.append(task)
            running = [task for task in running if task.go_on()]

    def _fits(self, task: _Task[object] | None, running: Sequence[_Task[object]]) -> bool:
        """Whether it may begin now."""
        if not running:
            return True
        return task is not None and task.shares and running[0].shares and len(running) < self.max_concurrency
