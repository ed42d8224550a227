"""The models of a server: each is loaded on demand in a process of its own and unloaded when idle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from edgespec.engine.embeddings import Embedding
from edgespec.engine.events import Event, Finished, Notice, Request
from edgespec.errors import Cancelled, EdgespecError, InvalidRequest, UnknownModel
from edgespec.planner.plan import LoadConfig
from edgespec.server.limiter import FairLimiter
from edgespec.server.metrics import ServerMetrics
from edgespec.service.client import ModelInfo
from edgespec.service.process import EngineProcess
from edgespec.service.stream import Stream

_IDLE_CHECK_S = 1.0
_POLL_S = 0.1


class Busy(EdgespecError):
    """The queue is full; `retry_after_s` is the estimated time until a place is free."""

    def __init__(self, message: str, *, hint: str, retry_after_s: int) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits of a server.

    max_open      models in memory
    max_queue     requests that may wait for one model
    keep_alive_s  how long an idle model stays loaded
    timeout_s     how long an answer may take
    """

    max_open: int = 1
    max_queue: int = 64
    keep_alive_s: float = 300.0
    timeout_s: float = 600.0


class ModelSlot:
    """One model and its queue of requests."""

    def __init__(self, name: str, request: LoadConfig, policy: Policy, server_metrics: ServerMetrics) -> None:
        self.name = name
        self.limiter = FairLimiter(request.load.caches)
        self.opening: asyncio.Task[ModelInfo] | None = None
        self.used_s = monotonic()
        self._request = request
        self._policy = policy
        self._server_metrics = server_metrics
        self._client: EngineProcess | None = None
        self._is_closing = False

    @property
    def model_info(self) -> ModelInfo | None:
        return self._client.model_info if self._client is not None else None

    @property
    def has_process(self) -> bool:
        """Whether the model has an engine process, loaded or not."""
        return self._client is not None

    @property
    def holds_memory(self) -> bool:
        """Whether the model is loaded or being unloaded."""
        return self.model_info is not None or self._is_closing

    @property
    def is_busy(self) -> bool:
        return self.limiter.active > 0 or self.limiter.waiting > 0 or self.opening is not None

    @property
    def resident(self) -> int:
        """Resident bytes of the engine process and this process."""
        return self._client.resident if self._client is not None else 0

    async def enter(self, *, is_new: bool = True) -> None:
        """Wait for a turn; `leave` ends it. Raises Busy if `is_new` and the queue is full."""
        limiter = self.limiter
        if is_new and limiter.is_full and limiter.waiting >= self._policy.max_queue:
            self._server_metrics.refused.labels(self.name).inc()
            mean_s = self._server_metrics.seconds_a_call(self.name)
            after_s = max(1, round(mean_s * limiter.waiting / limiter.max_concurrency))
            message = f"{limiter.waiting} requests are waiting for this model."
            raise Busy(message, hint=f"Try again in {after_s} seconds.", retry_after_s=after_s)
        await limiter.enter()
        self.used_s = monotonic()

    def leave(self) -> None:
        self.used_s = monotonic()
        self.limiter.leave()

    async def open(self) -> ModelInfo:
        """Load the model. Raises any EdgespecError."""
        if self._client is None:
            self._client = EngineProcess("The next request loads it again.")
        model_info = await self._client.open(self._request, self._server_metrics).wait()
        self.limiter.max_concurrency = model_info.max_concurrency
        self.used_s = monotonic()
        return model_info

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[AsyncIterator[list[Event]]]:
        """The events of one generation, in batches, within a turn.

        Leaving the context cancels the generation. The turn ends when the engine has finished it.
        """
        assert self._client is not None
        try:
            stream = self._client.stream(request)
        except BaseException:
            self.leave()
            raise
        loop, began_s = asyncio.get_running_loop(), monotonic()
        relay: Stream[Event] = Stream(stream.cancel, is_bounded=False)
        timers: list[asyncio.TimerHandle] = []
        has_begun = False

        def start_timer() -> None:
            timers.append(self._start_timer(stream))

        def end() -> None:
            for timer in timers:
                timer.cancel()
            if (model_info := self.model_info) is not None:
                self.limiter.max_concurrency = model_info.max_concurrency
            self.leave()

        def on_loop(function: Callable[..., None], *values: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(function, *values)

        def put(event: Event) -> None:
            nonlocal has_begun
            if not has_begun:  # the time limit starts with the first event, not while other requests are generated
                has_begun = True
                on_loop(start_timer)
            if isinstance(event, Finished | Notice):
                on_loop(self._count, event, began_s)
            relay.put(event)

        def finish(error: BaseException | None) -> None:
            on_loop(end)  # before the reader sees the end: its next request finds the turn free
            relay.end(error)

        stream.forward(put, finish)
        try:
            yield relay.batches()
        finally:
            relay.cancel()

    async def count(self, request: Request) -> int:
        """Number of tokens of the prompt, within a turn."""
        assert self._client is not None
        return await self._client.count(request.prompt, request.variables).wait()

    async def embed(self, texts: Sequence[str | list[int]]) -> list[Embedding]:
        """A vector for each text, within a turn. Raises InvalidRequest after the time limit."""
        assert self._client is not None
        stream = self._client.embed(texts)
        timer = self._start_timer(stream)
        try:
            return [vector async for vector in stream]
        except Cancelled as error:
            message = f"the embeddings took longer than {self._policy.timeout_s:.0f} seconds."
            raise InvalidRequest(message, hint="Send fewer or shorter inputs.") from error
        finally:
            timer.cancel()
            stream.cancel()

    async def unload(self) -> None:
        """Unload the model after its current requests."""
        async with self.limiter.exclusive():
            await self.close()

    async def close(self) -> None:
        """Unload the model now; its requests fail."""
        if (client := self._client) is not None:
            self._is_closing = True
            try:
                await asyncio.to_thread(client.close)
            finally:
                self._client, self._is_closing = None, False

    def _count(self, event: Event, began_s: float) -> None:
        if isinstance(event, Finished):
            self._server_metrics.add(self.name, event, monotonic() - began_s)
        elif isinstance(event, Notice):
            self._server_metrics.notice(event.text)

    def _start_timer(self, stream: Stream[Any]) -> asyncio.TimerHandle:
        """A timer that cancels `stream` after the time limit; the caller cancels the timer."""
        return asyncio.get_running_loop().call_later(self._policy.timeout_s, stream.cancel)


class Models:
    """The slots by the names that clients use, and the limit of loaded models."""

    def __init__(
        self,
        requests: Mapping[str, LoadConfig],
        policy: Policy,
        server_metrics: ServerMetrics,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """`aliases`: other names that clients may use, with the name in `requests` that each stands for."""
        self.slots = {name: ModelSlot(name, request, policy, server_metrics) for name, request in requests.items()}
        self._aliases = aliases or {}
        self._policy = policy
        self._opening = asyncio.Lock()

    def find(self, name: str) -> ModelSlot:
        """Raises UnknownModel."""
        if (slot := self.slots.get(name) or self.slots.get(self._aliases.get(name, ""))) is None:
            names = ", ".join(sorted(self.slots))
            raise UnknownModel(f"there is no model '{name}' here.", hint=f"There are: {names}.")
        return slot

    async def enter(self, slot: ModelSlot, *, is_new: bool = True) -> ModelInfo:
        """Wait for a turn in `slot` and load its model. Raises Busy (see ModelSlot.enter) or any EdgespecError."""
        await slot.enter(is_new=is_new)
        try:
            if (model_info := slot.model_info) is not None:
                return model_info
            if slot.opening is None:
                slot.opening = asyncio.create_task(self._open(slot))
                slot.opening.add_done_callback(_consume_error)
            return await asyncio.shield(slot.opening)  # a caller that leaves must not cancel it for the others
        except BaseException:
            slot.leave()
            raise

    async def _open(self, slot: ModelSlot) -> ModelInfo:
        try:
            async with self._opening:  # one load at a time, since it may unload another model
                await self._evict_for(slot)
                return await slot.open()
        finally:
            slot.opening = None

    @asynccontextmanager
    async def turn(self, slot: ModelSlot) -> AsyncIterator[ModelInfo]:
        """`enter`, and `leave` at the end."""
        model_info = await self.enter(slot)
        try:
            yield model_info
        finally:
            slot.leave()

    async def watch(self) -> None:
        """Unload models that are idle for too long. Never returns."""
        while True:
            await asyncio.sleep(_IDLE_CHECK_S)
            for slot in self.slots.values():
                idle_s = monotonic() - slot.used_s
                if slot.has_process and not slot.is_busy and idle_s > self._policy.keep_alive_s:
                    await slot.unload()

    async def close(self) -> None:
        for slot in self.slots.values():
            if slot.opening is not None:
                slot.opening.cancel()
        await asyncio.gather(*(slot.close() for slot in self.slots.values()))

    async def _evict_for(self, slot: ModelSlot) -> None:
        """Unload models, idle and least recently used first, until `slot` may be loaded."""
        others = [each for each in self.slots.values() if each is not slot and each.holds_memory]
        others.sort(key=lambda each: (each.is_busy, each.used_s))
        for each in others[: max(0, len(others) + 1 - self._policy.max_open)]:
            unloading = asyncio.create_task(each.unload())
            # Polls: after a crash it holds no memory, but its callers may wait for this lock and block `unload`.
            while each.holds_memory and not (await asyncio.wait({unloading}, timeout=_POLL_S))[0]:
                pass
            unloading.cancel()


def _consume_error(opening: asyncio.Task[ModelInfo]) -> None:
    """Mark the error of a load as seen: all callers may have left."""
    if not opening.cancelled():
        opening.exception()
