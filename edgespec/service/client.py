"""What a front end asks of an engine: open models, generate, measure. `LocalEngine` and `EngineProcess` are the two."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from edgespec.autopilot.stats import DraftStats
from edgespec.backends import BackendName
from edgespec.backends.devices import DeviceMemory
from edgespec.backends.settings import RuntimeSettings
from edgespec.engine.drafting import Speculation
from edgespec.engine.events import AnswerStart, Event, Prompt, Request, SlotState
from edgespec.engine.prompts import Embedding
from edgespec.errors import BackendError, EdgespecError, InvalidRequest, NotReady
from edgespec.planner.load_config import LoadConfig, Reporter
from edgespec.planner.memory import Fit
from edgespec.registry.schema import SamplingDefaults
from edgespec.text.template_profile import NO_TEMPLATE, TemplateProfile

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
        """Add the last events. The work is over; once."""
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


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A loaded model, described by values that can be sent to another process.

    drafters            what the user calls each drafter, by its name in the registry
    chat_template       Jinja source, as it came with the model
    fit                 the memory estimate made before loading; None for the toy runtime
    plain_speed         tokens/s of plain decoding; None until it has been measured
    devices             accelerators with their free memory
    max_concurrency     answers that can be generated at the same time
    no_batching_reason  why answers do not share forwards; None where they do
    settings            of the runtime, as measured at the first load; None where it has none to choose
    exact_width         rows of every forward, where --exact fixes them; else None
    remembered          about how many tokens of the user's earlier texts the memory has; None where it is off
    template            what the chat template shows, and how the model writes
    """

    name: str
    backend: BackendName
    drafters: Mapping[str, str]
    sampling: SamplingDefaults
    chat_template: str | None
    fit: Fit | None
    plain_speed: float | None
    context_size: int
    speculation: Speculation
    is_paused: bool
    devices: tuple[DeviceMemory, ...]
    max_concurrency: int
    no_batching_reason: str | None
    settings: RuntimeSettings | None = None
    exact_width: int | None = None
    remembered: int | None = None
    template: TemplateProfile = NO_TEMPLATE

    @property
    def draft(self) -> str:
        """What the user calls the drafters, joined by '+'; 'none' for plain decoding."""
        return "+".join(self.drafters.values()) or "none"

    def keep_speculation(self, config: LoadConfig) -> LoadConfig:
        """`config` with the present settings of `/spec`, for the next draft or model."""
        kept = replace(config, is_paused=self.is_paused)
        now = self.speculation
        return replace(kept, draft_max=now.draft_max, draft_tree=now.draft_tree) if now.drafters else kept


class EngineClient(ABC):
    """Every method returns at once. Jobs run in order, up to `max_concurrency` answers at the same time; beside them go
    `speculate`, `draft_stats`, `devices`, `slots` and `count`.

    A stream of work that needs an open model raises InvalidRequest where there is none.
    """

    @property
    @abstractmethod
    def model_info(self) -> ModelInfo | None:
        """The open model; None where there is none."""

    @property
    @abstractmethod
    def resident(self) -> int:
        """Bytes of memory that the engine and this process take."""

    @abstractmethod
    def close(self) -> None:
        """Cancel all work, store what was learned and free the model."""

    @abstractmethod
    def call(self, method: str, *arguments: Any, reporter: Reporter | None = None) -> Stream[Any]:
        """Begin the work of the method of that name below."""

    def take_failure(self) -> EdgespecError | None:
        """Why the engine has ended by itself while no stream was there to tell it; once for each end."""
        return None

    def open(self, config: LoadConfig, reporter: Reporter, settings_s: float | None = None) -> Stream[ModelInfo]:
        """Open a model in place of the present one, which stays open where that fails. `settings_s`: see Loader."""
        return self.call("open", config, settings_s, reporter=reporter)

    def change_draft(self, config: LoadConfig, reporter: Reporter) -> Stream[ModelInfo]:
        """Open another draft for the model. On failure the present draft stays."""
        return self.call("change_draft", config, reporter=reporter)

    def stream(self, request: Request, speculation: Speculation | None = None) -> Stream[Event]:
        """Generate. `speculation` replaces the engine's for this generation.

        Another version of an adapted draft is loaded first, once the running generations end.
        """
        return self.call("stream", request, speculation)

    def speculate(self, argument: str) -> Stream[ModelInfo]:
        """Run `/spec argument`, during a generation too. Raises InvalidRequest."""
        return self.call("speculate", argument)

    def draft_stats(self) -> Stream[DraftStats | None]:
        """Read what the autopilot has learned; None before it has measured."""
        return self.call("draft_stats")

    def count(self, prompt: Prompt, variables: Mapping[str, Any], start: AnswerStart | None = None) -> Stream[int]:
        """Count the tokens of a prompt, which may be more than the context holds."""
        return self.call("count", prompt, dict(variables), start)

    def embed(self, texts: Sequence[str | Sequence[int]]) -> Stream[Embedding]:
        return self.call("embed", list(texts))

    def devices(self) -> Stream[Sequence[DeviceMemory]]:
        """List the accelerators that a model would run on."""
        return self.call("devices")

    def slots(self) -> Stream[Sequence[SlotState]]:
        """List what the slots of the model hold."""
        return self.call("slots")


def require_model(client: EngineClient) -> ModelInfo:
    """Return the open model. Raises InvalidRequest where there is none."""
    if (model_info := client.model_info) is None:
        raise no_model()
    return model_info


def no_model() -> InvalidRequest:
    """The error of work that needs an open model where there is none."""
    return NotReady("no model is open.", hint="/model chooses one.")


def closed() -> BackendError:
    """The error of work for an engine that has been closed."""
    return BackendError("the model has been closed.", hint="Load it again.")
