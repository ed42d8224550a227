"""A model of this machine: its engine process, its queue, and how long a call may take."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from time import monotonic
from typing import Literal, TypeVar

from edgespec.answers.response import Part
from edgespec.autopilot.speculation import Speculation
from edgespec.client.client import EngineClient
from edgespec.client.process import EngineProcess
from edgespec.client.stream import Stream
from edgespec.engine.events import Event, Finished, Notice, Request
from edgespec.engine.model_info import ModelInfo
from edgespec.engine.prompts import Embedding
from edgespec.models.file_facts import FileFacts
from edgespec.models.load_config import LoadConfig
from edgespec.server.http import HttpError, Policy
from edgespec.server.metrics import ServerMetrics
from edgespec.server.record import request_context


class FairLimiter:
    """A semaphore in the order of arrival, with a limit that can change, and with exclusive access."""

    def __init__(self, max_concurrency: int = 1) -> None:
        """`max_concurrency`: how many callers may be inside at once."""
        self.max_concurrency = max_concurrency
        self.active = 0  # callers inside
        self.is_exclusive = False
        self._queue: deque[tuple[asyncio.Future[None], bool]] = deque()

    @property
    def waiting(self) -> int:
        """Callers that wait for their turn; those that want exclusive access do not count."""
        return sum(not admitted.done() and not exclusive for admitted, exclusive in self._queue)

    @property
    def is_full(self) -> bool:
        """Whether a new caller has to wait."""
        return bool(self._queue) or self.is_exclusive or self.active >= self.max_concurrency

    def resize(self, max_concurrency: int) -> None:
        self.max_concurrency = max_concurrency
        self._admit()

    async def enter(self, *, exclusive: bool = False) -> None:
        """Wait for a turn, which `leave` ends. With `exclusive`, the turn begins once all callers have left, and new
        ones wait until it ends.
        """
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((admitted, exclusive))
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():  # admitted just before the cancellation
                self.leave()
            self._admit()  # the next caller in the queue
            raise

    def leave(self) -> None:
        self.active -= 1
        self.is_exclusive = False
        self._admit()

    def _admit(self) -> None:
        while self._queue and not self.is_exclusive:
            admitted, exclusive = self._queue[0]
            if not admitted.cancelled():
                if self.active and (exclusive or self.active >= self.max_concurrency):
                    return
                self.active += 1
                self.is_exclusive = exclusive
                admitted.set_result(None)
            self._queue.popleft()


GenerateAnswer = Callable[[ModelInfo | None, int], AsyncGenerator[list[Part], None]]
"""One answer within a turn: its parts, in batches. It gets the loaded model, None for one of another server, and the
number among the answers to a prompt.
"""


class Slot:
    """What models of this machine and of other servers share."""

    def __init__(self, name: str, max_concurrency: int, policy: Policy, server_metrics: ServerMetrics) -> None:
        """`max_concurrency`: calls that may have a turn at once."""
        self.name = name
        self.limiter = FairLimiter(max_concurrency)
        self.used_s = monotonic()
        self._visitors = 0
        self._policy = policy
        self._server_metrics = server_metrics

    def apply_keep_alive(self, seconds: float | None) -> tuple[str, ...]:
        """Set how long a model of this machine stays loaded, unless `seconds` is None; returns warnings."""
        return ()

    @property
    def is_busy(self) -> bool:
        return self.limiter.active + self.limiter.waiting + self._visitors > 0

    @asynccontextmanager
    async def turn(self, *, is_new: bool = True) -> AsyncIterator[None]:
        """Wait for a turn, and hold it. Raises HttpError (429) if `is_new` and the queue is full."""
        request_context().model = self.name
        limiter = self.limiter
        if is_new and limiter.is_full and limiter.waiting >= self._policy.max_queue:
            after_s = 1 + limiter.waiting // limiter.max_concurrency  # as if an answer took a second
            message = f"{limiter.waiting} requests are waiting for this model."
            raise HttpError(429, message, hint=f"Try again in {after_s} seconds.", retry_after_s=after_s)
        await limiter.enter()
        self.used_s = monotonic()
        try:
            yield
        finally:
            self.used_s = monotonic()
            limiter.leave()

    def _count_embeddings(self, texts: int, tokens: int) -> None:
        request_context().prompt_tokens += tokens
        self._server_metrics.metric("embeddings", self.name).inc(texts)
        self._server_metrics.metric("embedded_tokens", self.name).inc(tokens)

    @asynccontextmanager
    async def visit(self) -> AsyncIterator[None]:
        """Keep the model from being unloaded. Takes no turn, no place in the queue, and no part in the metrics."""
        request_context().model = self.name
        while self.limiter.is_exclusive:
            await asyncio.sleep(_POLL_S)
        self._visitors += 1
        try:
            yield
        finally:
            self._visitors -= 1
            self.used_s = monotonic()


T = TypeVar("T")

_STALLED_S = 10.0  # of silence; sound processes give a sign every second
_GRACE_S = 3.0  # for an engine to end an answer that has been cancelled
_POLL_S = 0.05


class ModelSlot(Slot):
    """A model of this machine and its queue of requests."""

    owner = "edgespec"

    def __init__(
        self,
        name: str,
        request: LoadConfig,
        policy: Policy,
        server_metrics: ServerMetrics,
        facts: FileFacts | None = None,
    ) -> None:
        """`facts`: what the model's file tells, known before it is loaded; a load tells them too."""
        super().__init__(name, request.load.caches, policy, server_metrics)
        self._facts = facts
        self.opening: asyncio.Task[ModelInfo] | None = None
        self.keep_alive_s = policy.keep_alive_s  # of the model as it is loaded; a call may change it
        self.config = request
        self.client: EngineProcess | None = None  # there is one from the first load to the unloading
        self._is_closing = False

    @property
    def model_info(self) -> ModelInfo | None:
        return self.client.model_info if self.client is not None else None

    @property
    def facts(self) -> FileFacts | None:
        """What the model's file tells; None if it is not downloaded."""
        model_info = self.model_info
        return (model_info.facts if model_info is not None else None) or self._facts

    @property
    def context_size(self) -> int | None:
        """Tokens; None if that is not known before the model has been loaded."""
        model_info = self.model_info
        return model_info.context_size if model_info is not None else self.config.load.context_size

    @property
    def state(self) -> Literal["unloaded", "loading", "loaded", "unloading"]:
        if self._is_closing:
            return "unloading"
        if self.opening is not None:
            return "loading"
        return "loaded" if self.model_info is not None else "unloaded"

    def apply_keep_alive(self, seconds: float | None) -> tuple[str, ...]:
        if seconds is None:
            return ()
        if not request_context().caller.may_manage:
            return ("keep_alive (ttl) is ignored: this caller may not manage models.",)
        self.keep_alive_s = seconds
        return ()

    @property
    def unloads_in_s(self) -> float:
        """Seconds until the model is unloaded, from the end of its calls on; `inf`: not by itself."""
        idle_s = 0.0 if self.is_busy else monotonic() - self.used_s
        return max(0.0, self.keep_alive_s - idle_s)

    @property
    def is_busy(self) -> bool:
        return super().is_busy or self.opening is not None

    @property
    def resident(self) -> int:
        """Resident bytes of the engine process and this process."""
        return self.client.resident if self.client is not None else 0

    @property
    def silent_s(self) -> float:
        """Seconds for which the engine process has given no sign of life."""
        return self.client.silent_s if self.client is not None else 0.0

    @property
    def is_stalled(self) -> bool:
        """Whether the engine process has been silent for so long that something must be wrong with it."""
        return self.silent_s >= min(_STALLED_S, self._policy.max_silence_s / 2)

    async def open(self, *, measures_later: bool) -> ModelInfo:
        """Load the model; see EngineClient.open. Raises any EdgespecError."""
        if self.client is None:
            self.client = EngineProcess(
                "The next request loads it again.",
                self._policy.max_silence_s,
                lambda death: self._server_metrics.note_death(self.name, death),
            )
        model_info = await self.client.open(self.config, self._server_metrics, measures_later=measures_later).wait()
        self._server_metrics.metric("opens", self.name).inc()
        self._server_metrics.notice(f"{self.name}: loaded, with a context of {model_info.context_size:,} tokens")
        self.limiter.resize(model_info.max_concurrency)
        self.used_s = monotonic()
        return model_info

    async def stream(
        self, request: Request, speculation: Speculation | None = None
    ) -> AsyncGenerator[list[Event], None]:
        """The events of one generation, in batches, within a turn. `speculation` replaces the engine's.

        Closing the generator cancels the generation, and waits until the engine has ended it. Reading, by one task,
        raises HttpError if the engine does not end the answer in time.
        """
        assert self.client is not None
        began_s = monotonic()
        stream = self.client.stream(replace(request, reports_steps=False), speculation)
        timer = asyncio.get_running_loop().call_later(self._policy.timeout_s, stream.cancel)
        try:
            async with asyncio.timeout(self._policy.timeout_s + _GRACE_S):
                async for batch in stream.batches():
                    self._count(batch, began_s)
                    yield batch
        except TimeoutError:
            message = f"the answer did not end within {self._policy.timeout_s:g} seconds."
            raise HttpError(504, message, hint="Unload the model with `edgespec stop --now`.") from None
        finally:
            timer.cancel()
            stream.cancel()
            with suppress(Exception):  # which the reader has had, or does not want
                async with asyncio.timeout(_GRACE_S):
                    async for batch in stream.batches():
                        self._count(batch, began_s)
            if (model_info := self.model_info) is not None:
                self.limiter.resize(model_info.max_concurrency)

    async def read(self, ask: Callable[[EngineClient], Stream[T]]) -> list[T]:
        """The results of `ask`, such as the tokens of a prompt, within a turn or a visit. Raises HttpError."""
        assert self.client is not None
        stream = ask(self.client)
        try:
            async with asyncio.timeout(self._policy.timeout_s):
                return [each async for each in stream]
        except TimeoutError as error:
            message = f"the model did not answer within {self._policy.timeout_s:g} seconds."
            raise HttpError(504, message, hint="Try again, or ask for less.") from error
        finally:
            stream.cancel()

    async def embed(
        self, texts: Sequence[str | list[int]], dimensions: int | None = None, *, truncate: bool = False
    ) -> list[Embedding]:
        """A vector of the model's own size for each text, within a turn; see engine.prompts.embed."""
        vectors = await self.read(lambda client: client.embed(texts, truncate=truncate))
        self._count_embeddings(len(vectors), sum(each.tokens for each in vectors))
        return vectors

    async def stop(self) -> None:
        """End the engine process at once, whatever it does. Its calls fail; those that wait load the model again."""
        if (client := self.client) is not None:
            client.kill("the model was stopped")
            self.keep_alive_s = self._policy.keep_alive_s
            while client.model_info is not None:
                await asyncio.sleep(_POLL_S)

    async def unload(self) -> None:
        """Unload the model after its current requests."""
        await self.limiter.enter(exclusive=True)
        try:
            while self._visitors:
                await asyncio.sleep(_POLL_S)
            await self.close()
        finally:
            self.limiter.leave()

    async def close(self) -> None:
        """Unload the model now; its requests fail."""
        if (client := self.client) is not None:
            self._is_closing = True
            self.keep_alive_s = self._policy.keep_alive_s
            try:
                await asyncio.to_thread(client.close)
            finally:
                self.client, self._is_closing = None, False

    def _count(self, events: list[Event], began_s: float) -> None:
        for event in events:
            if isinstance(event, Finished):
                request_context().add(event)
                self._server_metrics.add(self.name, event, monotonic() - began_s)
            elif isinstance(event, Notice):
                self._server_metrics.notice(event.text)
