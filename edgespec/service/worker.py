"""The thread that owns the models. Jobs run on it, several at a time where they share it, and take turns."""

from __future__ import annotations

import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from math import inf
from time import monotonic
from typing import Any, Generic, TypeVar

from edgespec.backends import leave_thread
from edgespec.core.batching import Yield
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import Cancelled
from edgespec.service.stream import Stream

T = TypeVar("T")
Work = Callable[[CheckCancelled], Iterator[T | Yield]]

_IDLE_S = 2.0  # without a job, before what is done when idle begins

# Some of llama.cpp's pre-tokenizers recurse for every character of a word. Only pages that are touched take memory.
_STACK_BYTES = 512 * 2**20


@dataclass(eq=False)
class _Job(Generic[T]):
    work: Work[T]
    stream: Stream[T]
    shares: bool
    on_sign: Callable[[], None]
    events: Iterator[T | Yield] | None = None

    def advance(self) -> bool:
        """Run up to the next Yield, on the owner thread; returns whether there is more to do."""
        try:
            if self.events is None:
                self.events = self.work(self._check)
            for event in self.events:
                if isinstance(event, Yield):
                    return True
                self.stream.put(event)
        except BaseException as error:  # noqa: BLE001 - the reader raises it
            self.stream.end(error)
        else:
            self.stream.end()
        return False

    def _check(self) -> None:
        self.on_sign()
        if self.stream.is_cancelled:
            raise Cancelled


class Worker:
    """Starts its thread at once."""

    def __init__(
        self,
        after_turn: Callable[[], None] = lambda: None,
        set_idle: Callable[[bool], None] = lambda is_idle: None,
        when_idle: Callable[[CheckCancelled], None] | None = None,
    ) -> None:
        """`after_turn` is called on the thread each time that every running job has advanced, `set_idle` when it has
        nothing to do and when it has again. `when_idle` is called once in each idle time of two seconds; the check that
        it is given raises Cancelled when a job arrives. Where one of them raises anything else, the jobs and all later
        ones end with that error.
        """
        self.max_concurrency = 1  # of the jobs that share the thread; set on the thread
        self._after_turn = after_turn
        self._set_idle = set_idle
        self._when_idle = when_idle
        self._signed_s = inf  # when the thread last gave a sign of life; inf: it waits, or does what may take long
        self._submitted: queue.Queue[_Job[Any] | None] = queue.Queue()
        self._waiting: deque[_Job[Any] | None] = deque()
        self._running: list[_Job[Any]] = []
        self._thread = threading.Thread(target=self._run, name="edgespec-worker", daemon=True)
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._thread.start()
        finally:
            threading.stack_size(before)

    @property
    def silent_s(self) -> float:
        """Seconds since a job that shares the thread polled its check or ended a turn; 0 where no such job runs.

        Other jobs load models, which may take any time.
        """
        return max(0.0, monotonic() - self._signed_s)

    def submit(self, work: Work[T], *, shares: bool = False) -> Stream[T]:
        """Queue `work`, which polls the check that it is given.

        Jobs that share the thread may begin while others that share it run; each runs up to its next Yield in turn.
        """
        stream: Stream[T] = Stream()
        self._submitted.put(_Job(work, stream, shares, self._sign))
        return stream

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread and wait for its result. Raises what it raises."""

        def work(_check: CheckCancelled) -> Iterator[T]:
            yield function()

        return self.submit(work).result()

    def close(self) -> None:
        """Finish the queued jobs and end the thread."""
        self._submitted.put(None)
        self._thread.join()

    def _run(self) -> None:
        if hasattr(signal, "pthread_sigmask"):  # Ctrl-C is the main thread's, even while that waits in a system call
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._take_turns()
        except Exception as error:  # noqa: BLE001 - of a callback; whoever waits hears of it
            self._refuse(error)
        finally:
            leave_thread()

    def _refuse(self, error: Exception) -> None:
        """End the jobs of now and of later with `error`, until the worker is closed."""
        self._signed_s = inf
        for job in chain(self._running, self._waiting, iter(self._submitted.get, None)):
            if job is None:
                return
            job.stream.end(error)

    def _take_turns(self) -> None:
        waiting = self._waiting
        while True:
            self._signed_s = inf
            if not waiting and not self._running:
                self._set_idle(True)
                waiting.append(self._await_job())
                self._set_idle(False)
            with suppress(queue.Empty):
                while True:
                    waiting.append(self._submitted.get_nowait())
            while waiting and self._may_begin(waiting[0]):
                job = waiting.popleft()
                if job is None:
                    return
                self._running.append(job)
            if self._running and self._running[0].shares:
                self._signed_s = monotonic()
            self._running = [job for job in self._running if job.advance()]
            self._after_turn()

    def _await_job(self) -> _Job[Any] | None:
        if self._when_idle is not None:
            with suppress(queue.Empty):
                return self._submitted.get(timeout=_IDLE_S)
            with suppress(Cancelled):
                self._when_idle(self._check_idle)
        return self._submitted.get()

    def _check_idle(self) -> None:
        if not self._submitted.empty():
            raise Cancelled

    def _sign(self) -> None:
        if self._signed_s != inf:
            self._signed_s = monotonic()

    def _may_begin(self, job: _Job[Any] | None) -> bool:
        if not (running := self._running):
            return True
        return job is not None and job.shares and running[0].shares and len(running) < self.max_concurrency
