"""The thread that owns the models, on which jobs take turns."""

from __future__ import annotations

import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from time import monotonic, sleep
from typing import Any, Generic, TypeVar

from edgespec.backends import leave_thread
from edgespec.cancel import Check, cancellable, iterate
from edgespec.client.client import closed
from edgespec.client.stream import Stream
from edgespec.core.peers import Yield
from edgespec.errors import BackendError, Cancelled, reason_of

T = TypeVar("T")
Work = Callable[[], Iterator[T | Yield]]
_log = logging.getLogger(__name__)
_BACKOFF_S = 0.005
_IDLE_S = 2.0  # without a job, before `when_idle` is called
# Some of llama.cpp's pre-tokenizers recurse for every character of a word. Only pages that are touched take memory.
_STACK_BYTES = 512 * 2**20


@dataclass(eq=False)
class _Job(Generic[T]):
    events: Iterator[T | Yield]
    stream: Stream[T]
    shares: bool
    check: Check

    def advance(self) -> bool:
        """Run up to the next Yield, on the owner thread; returns whether there is more to do."""
        try:
            for event in self.events:
                if isinstance(event, Yield):
                    return True
                while self.stream.is_full:
                    self.check()
                    sleep(_BACKOFF_S)
                self.stream.put(event)
        except BaseException as error:  # noqa: BLE001 - the reader raises it
            self.stream.end(error)
        else:
            self.stream.end()
        return False


class Worker:
    """The thread that owns the models. Jobs run on it, several at a time if they share it, and take turns.

    It starts at once.
    """

    def __init__(
        self,
        after_turn: Callable[[], None] = lambda: None,
        set_idle: Callable[[bool], None] = lambda is_idle: None,
        when_idle: Callable[[], None] | None = None,
    ) -> None:
        """`after_turn` is called on the thread each time that every running job has advanced, `set_idle` when it has
        nothing to do and when it has again. `when_idle` is called once in each idle time of two seconds, and cancelled
        when a job arrives. If one of the three raises anything but this Cancelled, the jobs end with an error.
        """
        self.max_concurrency = 1  # of the jobs that share the thread; set on the thread
        self._after_turn = after_turn
        self._set_idle = set_idle
        self._when_idle = when_idle
        self._is_closing = False
        self._signed_s = inf  # when the thread last gave a sign of life; inf: it waits, or does what may take long
        self._waiting: deque[_Job[Any] | None] = deque()  # None ends the thread
        self._arrived = threading.Event()  # one of them, since the last look
        self._running: list[_Job[Any]] = []
        self._thread = threading.Thread(target=self._run, name="edgespec-worker", daemon=True)
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._thread.start()
        finally:
            threading.stack_size(before)

    @property
    def silent_s(self) -> float:
        """Seconds since a job that shares the thread polled its check or ended a turn; 0 if no such job runs.

        Other jobs load models, which may take any time.
        """
        return max(0.0, monotonic() - self._signed_s)

    def submit(self, work: Work[T], *, shares: bool = False) -> Stream[T]:
        """Queue `work`, which runs in a copy of the present context and is cancelled with the stream.

        Jobs that share the thread may begin while others that share it run; each runs up to its next Yield in turn.
        Once the thread has ended, the stream raises BackendError.
        """
        stream: Stream[T] = Stream()

        def check() -> None:
            if self._signed_s != inf:
                self._signed_s = monotonic()
            if stream.is_cancelled or self._is_closing:
                raise Cancelled

        def run() -> Iterator[T | Yield]:
            yield from work()

        self._put(_Job(iterate(run(), check), stream, shares, check))
        if not self._thread.is_alive():
            self._refuse_waiting()
        return stream

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread and wait for its result. Raises what it raises."""
        return self.submit(lambda: iter([function()])).result()

    def close(self, finish: Callable[[], None] = lambda: None) -> None:
        """Cancel all jobs, run `finish` on the thread and end it."""

        def work() -> Iterator[None]:
            finish()
            yield

        self._is_closing = True
        finished = self.submit(work)
        self._put(None)  # at once: what comes now is not begun
        try:
            finished.result()
        finally:
            self._thread.join()
            self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        """End the jobs that came when the thread had ended, or was about to."""
        with suppress(IndexError):
            while True:
                if (job := self._waiting.popleft()) is not None:
                    job.stream.end(closed())

    def _run(self) -> None:
        # Ctrl-C is the main thread's, even while that waits in a system call.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._take_turns()
        finally:
            leave_thread()

    def _put(self, job: _Job[Any] | None) -> None:
        self._waiting.append(job)
        self._arrived.set()

    def _take_turns(self) -> None:
        is_open = True
        while is_open:
            try:
                is_open = self._take_turn()
            except Exception as error:  # noqa: BLE001 - of a callback: those who wait are told
                self._refuse(error)

    def _take_turn(self) -> bool:
        """Begin the jobs that may begin and advance every one; returns False at the end of the thread."""
        self._signed_s = inf
        self._arrived.clear()
        if not self._waiting and not self._running:
            self._await_job()
        while self._waiting and self._may_begin(self._waiting[0]):
            job = self._waiting.popleft()
            if job is None:
                return False
            self._running.append(job)
        if self._running and self._running[0].shares:
            self._signed_s = monotonic()
        for job in tuple(self._running):
            if not job.advance():
                self._running.remove(job)
        self._after_turn()
        return True

    def _await_job(self) -> None:
        try:
            self._set_idle(True)
            if self._when_idle is not None and not self._arrived.wait(_IDLE_S):
                with suppress(Cancelled), cancellable(self._check_idle):
                    self._when_idle()
        finally:
            self._arrived.wait()
        self._set_idle(False)

    def _refuse(self, error: Exception) -> None:
        """End the jobs that run and those that wait, but for the last one of `close`."""
        _log.error("a callback of the engine's thread has failed", exc_info=error)
        refused: list[_Job[Any] | None] = [*self._running]
        self._running = []
        while self._waiting and not self._is_closing:
            refused.append(self._waiting.popleft())
        failure = BackendError(f"the engine's thread has failed: {reason_of(error)}.")
        for job in refused:
            with suppress(Exception):
                if job is not None:
                    job.stream.end(failure)

    def _check_idle(self) -> None:
        if self._waiting:
            raise Cancelled

    def _may_begin(self, job: _Job[Any] | None) -> bool:
        if not (running := self._running):
            return True
        return job is not None and job.shares and running[0].shares and len(running) < self.max_concurrency
