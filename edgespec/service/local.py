"""The engine on a worker thread of this process."""

from __future__ import annotations

import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from time import monotonic, sleep
from typing import Any, Generic, TypeVar

import psutil

from edgespec.autopilot.stats import DraftStats
from edgespec.backends import device_memory, leave_thread, prefers_mlx
from edgespec.backends.devices import DeviceMemory
from edgespec.core.peers import Yield
from edgespec.core.protocols import CheckCancelled
from edgespec.engine.drafting import Speculation
from edgespec.engine.events import AnswerStart, Event, Notice, Prompt, Request, SlotState
from edgespec.engine.prompts import Embedding, embed
from edgespec.errors import BackendError, Cancelled, EdgespecError, reason_of
from edgespec.planner.load_config import LoadConfig, Quiet, Reporter
from edgespec.service.client import EngineClient, ModelInfo, Stream, closed, no_model, require_model
from edgespec.service.learn import Activity, Learner, is_on_battery, open_learner
from edgespec.service.load import Loader
from edgespec.service.loaded_model import LoadedModel, search_when_idle

T = TypeVar("T")
Work = Callable[[CheckCancelled], Iterator[T | Yield]]

_log = logging.getLogger(__name__)
_BACKOFF_S = 0.005
_IDLE_S = 2.0  # without a job, before what is done when idle begins

# Some of llama.cpp's pre-tokenizers recurse for every character of a word. Only pages that are touched take memory.
_STACK_BYTES = 512 * 2**20


@dataclass(eq=False)
class _Job(Generic[T]):
    events: Iterator[T | Yield]
    stream: Stream[T]
    shares: bool
    check: CheckCancelled

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
    """The thread that owns the models. Jobs run on it, several at a time where they share it, and take turns.

    It starts at once.
    """

    def __init__(
        self,
        after_turn: Callable[[], None] = lambda: None,
        set_idle: Callable[[bool], None] = lambda is_idle: None,
        when_idle: Callable[[CheckCancelled], None] | None = None,
    ) -> None:
        """`after_turn` is called on the thread each time that every running job has advanced, `set_idle` when it has
        nothing to do and when it has again. `when_idle` is called once in each idle time of two seconds; the check that
        it is given raises Cancelled when a job arrives. They raise nothing else.
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
        """Seconds since a job that shares the thread polled its check or ended a turn; 0 where no such job runs.

        Other jobs load models, which may take any time.
        """
        return max(0.0, monotonic() - self._signed_s)

    def submit(self, work: Work[T], *, shares: bool = False) -> Stream[T]:
        """Queue `work`, which polls the check that it is given.

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
            yield from work(check)

        self._put(_Job(run(), stream, shares, check))
        if not self._thread.is_alive():
            self._refuse_waiting()
        return stream

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread and wait for its result. Raises what it raises."""
        return self.submit(lambda _check: iter([function()])).result()

    def close(self, finish: Callable[[], None] = lambda: None) -> None:
        """Cancel all jobs, run `finish` on the thread and end it."""

        def work(_check: CheckCancelled) -> Iterator[None]:
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
                with suppress(Cancelled):
                    self._when_idle(self._check_idle)
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
        failure = BackendError(f"the engine's thread has failed: {reason_of(error)}.", hint="Try again.")
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


_LOOK_S = 1.0  # between two looks for another version of an adapted draft


class Notices(Quiet):
    """A Reporter that keeps the notices for a generation. Any thread may use it."""

    def __init__(self) -> None:
        self._texts: deque[str] = deque()

    def notice(self, text: str) -> None:
        self._texts.append(text)

    def take(self) -> Iterator[Notice]:
        """What was told since the last call."""
        while self._texts:
            yield Notice(self._texts.popleft())


# How a call is run: at once; or as a job on the thread that owns the models, which shares it with others of its kind or
# has it alone. `count` has a thread of its own.
_AT_ONCE = ("speculate", "draft_stats", "devices", "slots")
_SHARES = ("stream", "embed")


class LocalEngine(EngineClient):
    """Commands of one process use it directly; EngineProcess runs one in a process of its own."""

    def __init__(self, after_turn: Callable[[], None] = lambda: None, *, uses_idle_time: bool = False) -> None:
        """`after_turn`: see Worker. `uses_idle_time`: whether to search for a self-draft between answers."""
        self.loaded: LoadedModel | None = None
        self._learner: Learner | None = None
        self._activity = Activity()
        self._worker = Worker(after_turn, self._set_idle, self._search if uses_idle_time else None)
        self._reader = Worker()  # counts the tokens of prompts while the other generates
        self._free: tuple[DeviceMemory, ...] = ()
        self._notices = Notices()  # for the next generation
        self._look_s = 0.0  # when to look for another version of an adapted draft
        self._is_closed = False
        self._answered: LoadedModel | None = None
        self._searched: LoadedModel | None = None  # for which a search for a self-draft has ended, well or badly

    @property
    def model_info(self) -> ModelInfo | None:
        return loaded.describe(self._free) if (loaded := self.loaded) is not None else None

    @property
    def resident(self) -> int:
        return int(psutil.Process().memory_info().rss)

    @property
    def silent_s(self) -> float:
        """Seconds since the worker last gave a sign of life; 0 where it need not. See Worker.

        A forward on other machines gives none and may take minutes. The system ends connections to machines that are
        gone.
        """
        loaded = self.loaded
        return 0.0 if loaded is not None and loaded.config.load.workers else self._worker.silent_s

    def call(self, method: str, *arguments: Any, reporter: Reporter | None = None) -> Stream[Any]:
        if method == "count":
            return self._count(*arguments)
        work = getattr(self, f"_{method}")
        if reporter is not None:
            arguments = (*arguments, reporter)
        if method in _AT_ONCE:
            stream: Stream[Any] = Stream()
            try:
                stream.end(None, work(*arguments))
            except Exception as error:  # noqa: BLE001 - reading raises it
                stream.end(error)
            return stream
        if method == "stream":
            self._follow_versions()
        return self.submit(lambda check: work(check, *arguments), shares=method in _SHARES)

    def _open(
        self, check: CheckCancelled, config: LoadConfig, settings_s: float | None, reporter: Reporter
    ) -> Iterator[ModelInfo]:
        loader, present = Loader(reporter, check, settings_s), self.loaded
        if present is not None:
            loader.prepare(config, present)  # what cannot be opened leaves the present model open
            self._close_model()
        try:
            self.loaded = loader.load(config)
        except BaseException:
            with suppress(EdgespecError):
                if present is not None:
                    self.loaded = replace(loader, check=lambda: None).load(present.config)
                    self._learn(reporter)
                    self._refresh()
            raise
        self._learn(reporter)
        yield self._refresh()

    def _change_draft(self, check: CheckCancelled, config: LoadConfig, reporter: Reporter) -> Iterator[ModelInfo]:
        self.loaded = Loader(reporter, check).change_draft(self.require_loaded(), config)
        self._learn(reporter)
        yield self._refresh()

    def _stream(
        self, check: CheckCancelled, request: Request, speculation: Speculation | None
    ) -> Iterator[Event | Yield]:
        yield from self._notices.take()
        try:
            yield from self.require_loaded().engine.generate(request, check, speculation)
        finally:
            self._answered = self.loaded
            self._refresh_devices()

    def _embed(self, check: CheckCancelled, texts: Sequence[str | Sequence[int]]) -> Iterator[Embedding | Yield]:
        yield from embed(self.require_loaded().engine.target, texts, check)

    def _speculate(self, argument: str) -> ModelInfo:
        self.require_loaded().engine.change_speculation(argument)
        return require_model(self)

    def _draft_stats(self) -> DraftStats | None:
        engine = self.require_loaded().engine
        return engine.draft_stats if engine.has_draft_stats else None

    def _slots(self) -> Sequence[SlotState]:
        return self.require_loaded().engine.slots

    def _devices(self) -> tuple[DeviceMemory, ...]:
        return device_memory("mlx" if prefers_mlx() else "llamacpp")

    def close(self) -> None:
        """Further calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._worker.close(self._close_model)
        self._activity.set(False)
        self._reader.close()

    def submit(self, work: Work[T], *, shares: bool = False) -> Stream[T]:
        """Run other work on the thread that owns the models. `close` cancels it too."""
        return self._worker.submit(work, shares=shares)

    def require_loaded(self) -> LoadedModel:
        """The open model, to be used by `submit`ted work. Raises InvalidRequest where there is none."""
        if (loaded := self.loaded) is None:
            raise no_model()
        return loaded

    def _count(self, prompt: Prompt, variables: Mapping[str, Any], start: AnswerStart | None) -> Stream[int]:
        """Read a prompt on a thread with a stack as large as that of the models: some tokenizers need it."""

        def work(check: CheckCancelled) -> Iterator[int]:
            check()
            yield self.require_loaded().engine.prompts.count(prompt, variables, start)

        return self._reader.submit(work)

    def _follow_versions(self) -> None:
        """Have the versions of adapted drafts loaded that are in use now. Where that fails, the present ones stay."""
        if (loaded := self.loaded) is None or monotonic() < self._look_s:
            return
        self._look_s = monotonic() + _LOOK_S
        if not loaded.is_outdated:
            return

        def work(check: CheckCancelled) -> Iterator[None]:
            present = self.require_loaded()
            self.loaded = present.mark_seen()  # whatever fails now is not tried again
            try:
                if present.is_outdated:  # still, after the jobs before this one
                    self.loaded = Loader(self._notices, check).follow_versions(present)
                    self._refresh()
            except Exception as error:  # noqa: BLE001 - nobody reads this stream
                self._notices.notice(f"Drafting as before: {reason_of(error)}.")
            yield

        self.submit(work)

    def _learn(self, reporter: Reporter) -> None:
        """Train the draft of the open model from now on, if that is asked for, and no other."""
        if self._learner is not None:
            self._learner.close()
        self._learner = open_learner(self.require_loaded(), reporter.notice, self._notices.notice)

    def _close_model(self) -> None:
        learner, self._learner = self._learner, None
        if learner is not None:
            learner.close()
        loaded, self.loaded = self.loaded, None
        if loaded is not None:
            self._reader.call(lambda: None)  # what reads a prompt of this model ends first
            loaded.save_stats()
            loaded.engine.close()

    def _search(self, check: CheckCancelled) -> None:
        """Search for a self-draft of a model that has answered. A request interrupts it; the next idle time goes on."""
        loaded = self._answered
        if loaded is None or loaded is not self.loaded or loaded is self._searched:
            return
        try:
            if is_on_battery():
                return
            self._searched = loaded
            search_when_idle(loaded, check)
        except Cancelled:
            self._searched = None
        except Exception as error:  # noqa: BLE001 - nobody waits for it
            _log.debug("no self-draft was searched: %s", error)

    def _set_idle(self, is_idle: bool) -> None:
        self._activity.set(not is_idle)
        if (loaded := self.loaded) is not None and loaded.engine.memory is not None:
            loaded.engine.memory.set_idle(is_idle)
        if (learner := self._learner) is not None:
            learner.set_idle(is_idle)

    def _refresh(self) -> ModelInfo:
        self._refresh_devices()
        return require_model(self)

    def _refresh_devices(self) -> None:
        with suppress(EdgespecError):
            loaded = self.require_loaded()
            self._free = device_memory(loaded.info.backend)
            self._worker.max_concurrency = loaded.engine.max_concurrency
