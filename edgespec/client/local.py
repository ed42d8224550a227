"""The engine on a worker thread of this process."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from time import monotonic
from typing import Any, TypeVar

import psutil

from edgespec.autopilot.speculation import Speculation
from edgespec.autopilot.stats import DraftStats
from edgespec.backends import device_memory, prefers_mlx
from edgespec.cancel import cancellable, check_cancelled
from edgespec.client.client import EngineClient, no_model, require_model
from edgespec.client.stream import Stream
from edgespec.client.worker import Work, Worker
from edgespec.core.peers import Yield
from edgespec.core.protocols import Step
from edgespec.engine.activity import Activity
from edgespec.engine.events import AnswerStart, Event, Notice, Prompt, Request, SlotState
from edgespec.engine.loaded_model import LoadedModel
from edgespec.engine.model_info import ModelInfo
from edgespec.engine.open import Loader
from edgespec.engine.prompts import Embedding, embed
from edgespec.engine.selfdraft_choice import search_when_idle
from edgespec.errors import Cancelled, EdgespecError, reason_of
from edgespec.machines.memory import DeviceMemory
from edgespec.models.load_config import LoadConfig
from edgespec.progress import QUIET, Quiet, Reporter, notice, reporting
from edgespec.train.learn import Learner, is_on_battery, open_learner

_log = logging.getLogger(__name__)

T = TypeVar("T")
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
_COMPILING_S = 600.0
_MOST_UNMEASURED = 8  # answers after a load with `measures_later`, before it is measured between two of them


class LocalEngine(EngineClient):
    """An engine in this process. Commands use it directly; EngineProcess runs one in a process of its own."""

    def __init__(self, after_turn: Callable[[], None] = lambda: None, *, uses_idle_time: bool = False) -> None:
        """`after_turn`: see Worker. `uses_idle_time`: whether to measure and to search for a self-draft between
        answers.
        """
        self.loaded: LoadedModel | None = None
        self._learner: Learner | None = None
        self._activity = Activity()
        self._worker = Worker(after_turn, self._set_idle, self._use_idle_time if uses_idle_time else None)
        self._reader = Worker()  # counts the tokens of prompts while the other generates
        self._free: tuple[DeviceMemory, ...] = ()
        self._notices = Notices()  # for the next generation
        self._look_s = 0.0  # when to look for another version of an adapted draft
        self._is_closed = False
        self._answered: LoadedModel | None = None
        self._computed: LoadedModel | None = None  # has given a first token
        self._n_running = self._n_unmeasured = 0  # answers that run, and those since a load that measures later
        self._searched: LoadedModel | None = None  # for which a search for a self-draft has ended, well or badly

    @property
    def model_info(self) -> ModelInfo | None:
        return loaded.describe(self._free) if (loaded := self.loaded) is not None else None

    @property
    def resident(self) -> int:
        return int(psutil.Process().memory_info().rss)

    @property
    def silent_s(self) -> float:
        """Seconds since the worker last gave a sign of life; 0 if it need give none. See Worker.

        A forward on other machines gives none and may take minutes. The system ends connections to machines that are
        gone. Before the first token on a device, its driver may compile kernels for minutes, as Vulkan's does: ten of
        them count as no silence.
        """
        loaded, silent_s = self.loaded, self._worker.silent_s
        if loaded is None:
            return silent_s
        if loaded.config.load.workers:
            return 0.0
        may_compile = self._free and self._computed is not loaded and loaded.config.load.gpu_layers != 0
        return max(0.0, silent_s - _COMPILING_S) if may_compile else silent_s

    def call(self, method: str, *arguments: Any, reporter: Reporter | None = None) -> Stream[Any]:
        if method == "count":
            return self._count(*arguments)
        work = getattr(self, f"_{method}")
        if method in _AT_ONCE:
            stream: Stream[Any] = Stream()
            try:
                stream.end(None, work(*arguments))
            except Exception as error:  # noqa: BLE001 - reading raises it
                stream.end(error)
            return stream
        if method == "stream":
            self._follow_versions()
        with reporting(reporter or QUIET):
            return self.submit(lambda: work(*arguments), shares=method in _SHARES)

    def _open(self, config: LoadConfig, settings_s: float | None, measures_later: bool) -> Iterator[ModelInfo]:
        loader, present = Loader(settings_s, measures_later), self.loaded
        self._n_unmeasured = 0
        if present is not None:
            loader.prepare(config, present)  # what cannot be opened leaves the present model open
            self._close_model()
        try:
            self.loaded = loader.load(config)
        except BaseException:
            with suppress(EdgespecError), cancellable(lambda: None):
                if present is not None:
                    self.loaded = loader.load(present.config)
                    self._learn()
                    self._refresh()
            raise
        self._learn()
        yield self._refresh()

    def _change_draft(self, config: LoadConfig) -> Iterator[ModelInfo]:
        self.loaded = Loader().change_draft(self.require_loaded(), config)
        self._learn()
        yield self._refresh()

    def _stream(self, request: Request, speculation: Speculation | None) -> Iterator[Event | Yield]:
        yield from self._notices.take()
        if self._n_unmeasured >= _MOST_UNMEASURED and not self._n_running:
            with suppress(Cancelled):  # which `generate` tells
                self._measure_pending()  # there was no idle time
        self._n_running += 1
        try:
            loaded = self.require_loaded()
            with closing(loaded.engine.generate(request, speculation)) as events:
                for event in events:
                    yield event
                    if isinstance(event, Step):
                        break
                self._computed = loaded
                yield from events
        finally:
            self._n_running -= 1
            self._n_unmeasured += 1
            self._answered = self.loaded
            self._refresh_devices()

    def _embed(self, texts: Sequence[str | Sequence[int]], truncate: bool) -> Iterator[Embedding | Yield]:
        yield from embed(self.require_loaded().engine.target, texts, truncate=truncate)

    def _speculate(self, argument: str) -> ModelInfo:
        self.require_loaded().engine.change_speculation(argument)
        return require_model(self)

    def _draft_stats(self) -> DraftStats | None:
        engine = self.require_loaded().engine
        return engine.draft_stats if self.require_loaded().has_costs else None

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
        """The open model, to be used by `submit`ted work. Raises InvalidRequest if there is none."""
        if (loaded := self.loaded) is None:
            raise no_model()
        return loaded

    def _count(self, prompt: Prompt, variables: Mapping[str, Any], start: AnswerStart | None) -> Stream[int]:
        """Read a prompt on a thread with a stack as large as that of the models: some tokenizers need it."""

        def work() -> Iterator[int]:
            check_cancelled()
            yield self.require_loaded().engine.prompts.count(prompt, variables, start)

        return self._reader.submit(work)

    def _follow_versions(self) -> None:
        """Queue the loading of the versions of adapted drafts that are in use now, if they are not loaded yet. If it
        fails, the present ones stay.
        """
        if (loaded := self.loaded) is None or monotonic() < self._look_s:
            return
        self._look_s = monotonic() + _LOOK_S
        if not loaded.is_outdated:
            return

        def work() -> Iterator[None]:
            present = self.require_loaded()
            self.loaded = present.mark_seen()  # whatever fails now is not tried again
            try:
                if present.is_outdated:  # still, after the jobs before this one
                    self.loaded = Loader().follow_versions(present)
                    self._refresh()
            except Exception as error:  # noqa: BLE001 - nobody reads this stream
                self._notices.notice(f"Drafting as before: {reason_of(error)}.")
            yield

        with reporting(self._notices):
            self.submit(work)

    def _learn(self) -> None:
        """Train the draft of the open model from now on, if that is asked for, and no other."""
        if self._learner is not None:
            self._learner.close()
        self._learner = open_learner(self.require_loaded(), notice, self._notices.notice)

    def _close_model(self) -> None:
        learner, self._learner = self._learner, None
        if learner is not None:
            learner.close()
        loaded, self.loaded = self.loaded, None
        if loaded is not None:
            self._reader.call(lambda: None)  # what reads a prompt of this model ends first
            loaded.save_stats()
            loaded.engine.close()

    def _use_idle_time(self) -> None:
        self._activity.set(True)  # a training beside it would make all look slow
        try:
            self._measure_pending()
            self._search()
        finally:
            self._activity.set(False)

    def _measure_pending(self) -> None:
        """Measure what the load of the open model has left out. Raises Cancelled."""
        self._n_unmeasured = 0
        if (loaded := self.loaded) is None:
            return
        try:
            loaded.measure_pending()
        except Cancelled:
            raise
        except Exception as error:  # noqa: BLE001 - nobody waits for it
            loaded.pending.has_failed = True
            _log.debug("nothing was measured: %s", error)

    def _search(self) -> None:
        """Search for a self-draft of a model that has answered. A request interrupts it; the next idle time goes on."""
        loaded = self._answered
        if loaded is None or loaded is not self.loaded or loaded is self._searched:
            return
        try:
            if is_on_battery():
                return
            self._searched = loaded
            search_when_idle(loaded)
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
