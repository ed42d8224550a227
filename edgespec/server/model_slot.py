"""A model of this machine: its engine process, its queue, and how long a call may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from time import monotonic
from typing import Any, Literal, TypeVar

from edgespec.engine.drafting import Speculation
from edgespec.engine.embeddings import Embedding
from edgespec.engine.events import Event, Finished, Notice, Request
from edgespec.errors import BackendError, InvalidRequest, PromptTooLong
from edgespec.planner.plan import LoadConfig
from edgespec.server.metrics import ServerMetrics
from edgespec.server.policy import Policy, TimedOut
from edgespec.server.record import RequestRecord, current_record
from edgespec.server.redaction import hide_folders
from edgespec.server.slot import Slot
from edgespec.service.client import EngineClient, ModelInfo
from edgespec.service.engine_log import Death
from edgespec.service.process import EngineProcess
from edgespec.service.stream import Stream

T = TypeVar("T")

_STALLED_S = 10.0  # of silence; sound processes give a sign every second
_GRACE_S = 5.0  # for an engine to end an answer that has been cancelled
_POLL_S = 0.05


class ModelSlot(Slot):
    """A model of this machine and its queue of requests."""

    def __init__(self, name: str, request: LoadConfig, policy: Policy, server_metrics: ServerMetrics) -> None:
        super().__init__(name, request.load.caches, policy, server_metrics)
        self.opening: asyncio.Task[ModelInfo] | None = None
        self.keep_alive_s = policy.keep_alive_s  # of the model as it is loaded; a call may change it
        self.config = request
        self._client: EngineProcess | None = None
        self._is_closing = False

    @property
    def model_info(self) -> ModelInfo | None:
        return self._client.model_info if self._client is not None else None

    @property
    def context_size(self) -> int | None:
        """Tokens; None where that is not known before the model has been loaded."""
        model_info = self.model_info
        return model_info.context_size if model_info is not None else self.config.load.context_size

    @property
    def has_process(self) -> bool:
        """Whether the model has an engine process, loaded or not."""
        return self._client is not None

    @property
    def holds_memory(self) -> bool:
        """Whether the model is loaded or being unloaded."""
        return self.model_info is not None or self._is_closing

    @property
    def state(self) -> Literal["unloaded", "loading", "loaded", "unloading"]:
        if self._is_closing:
            return "unloading"
        if self.opening is not None:
            return "loading"
        return "loaded" if self.model_info is not None else "unloaded"

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
        return self._client.resident if self._client is not None else 0

    @property
    def silent_s(self) -> float:
        """Seconds for which the engine process has given no sign of life."""
        return self._client.silent_s if self._client is not None else 0.0

    @property
    def is_stalled(self) -> bool:
        """Whether the engine process has given none for so long that it is not well."""
        return self.silent_s >= min(_STALLED_S, self._policy.max_silence_s / 2)

    async def open(self) -> ModelInfo:
        """Load the model. Raises any EdgespecError."""
        if self._client is None:
            self._client = EngineProcess(
                "The next request loads it again.", self._policy.max_silence_s, self._note_death
            )
        model_info = await self._client.open(self.config, self._server_metrics).wait()
        self._server_metrics.note_open(self.name, model_info.context_size)
        self.limiter.max_concurrency = model_info.max_concurrency
        self.used_s = monotonic()
        return model_info

    @asynccontextmanager
    async def stream(
        self, request: Request, ends_s: float, speculation: Speculation | None = None
    ) -> AsyncIterator[AsyncIterator[list[Event]]]:
        """The events of one generation, in batches, within a turn; `ends_s`: see Turn. `speculation` replaces the
        engine's.

        Leaving the context cancels the generation. The turn ends when the engine has finished it. Reading raises
        TimedOut where the engine does not end the answer in time.
        """
        assert self._client is not None
        try:
            stream = self._client.stream(replace(request, reports_steps=False), speculation)
        except BaseException:
            self.leave()
            raise
        loop, began_s, record = asyncio.get_running_loop(), monotonic(), current_record()
        record.begin()
        relay: Stream[Event] = Stream(stream.cancel, is_bounded=False)
        message = f"the answer did not end within {self._policy.timeout_s:g} seconds."
        late = TimedOut(message, hint="Try again, or unload the model with `edgespec stop --now`.")
        timers = [
            loop.call_later(max(0.0, ends_s - began_s), stream.cancel),
            loop.call_later(max(0.0, ends_s - began_s) + _GRACE_S, relay.end, late),
        ]

        def end() -> None:
            for timer in timers:
                timer.cancel()
            if (model_info := self.model_info) is not None:
                self.limiter.max_concurrency = model_info.max_concurrency
            self.leave()
            record.end()

        def on_loop(function: Callable[..., None], *values: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(function, *values)

        def put(events: Sequence[Event]) -> None:
            for event in events:
                if isinstance(event, Finished | Notice):
                    on_loop(self._count, event, began_s, record)
            relay.put(*events)

        def finish(error: BaseException | None) -> None:
            if isinstance(error, PromptTooLong):
                self._server_metrics.notice(f"{self.name}: {error.message} A larger --ctx makes room.")
            on_loop(end)  # before the reader sees the end: its next request finds the turn free
            hide_folders(error)
            relay.end(error)

        stream.forward(put, finish)
        try:
            yield relay.batches()
        finally:
            relay.cancel()

    async def read(self, ask: Callable[[EngineClient], Stream[T]], ends_s: float) -> T:
        """The result of `ask`, such as the tokens of a prompt, within a turn or a visit; `ends_s`: see Turn.

        Raises TimedOut.
        """
        assert self._client is not None
        try:
            async with asyncio.timeout(ends_s - monotonic()):
                return await ask(self._client).wait()
        except BackendError as error:
            hide_folders(error)
            raise
        except TimeoutError as error:
            message = f"the model did not answer within {self._policy.timeout_s:g} seconds."
            raise TimedOut(message, hint="Try again.") from error

    async def embed(self, texts: Sequence[str | list[int]], ends_s: float) -> list[Embedding]:
        """A vector for each text, within a turn; `ends_s`: see Turn. Raises InvalidRequest after that."""
        assert self._client is not None
        stream = self._client.embed(texts)
        try:
            async with asyncio.timeout(ends_s - monotonic()):
                vectors = [vector async for vector in stream]
            tokens = sum(each.tokens for each in vectors)
            current_record().prompt_tokens += tokens
            self._server_metrics.note_embeddings(self.name, len(vectors), tokens)
            return vectors
        except BackendError as error:
            hide_folders(error)
            raise
        except TimeoutError as error:
            message = f"the embeddings took longer than {self._policy.timeout_s:.0f} seconds."
            raise InvalidRequest(message, hint="Send fewer or shorter inputs.") from error
        finally:
            stream.cancel()

    async def stop(self) -> None:
        """End the engine process at once, whatever it does. Its calls fail; those that wait load the model again."""
        if (client := self._client) is not None:
            client.kill("the model was stopped")
            while client.model_info is not None:
                await asyncio.sleep(_POLL_S)

    async def unload(self) -> None:
        """Unload the model after its current requests."""
        async with self.limiter.exclusive():
            await self.close()

    async def close(self) -> None:
        """Unload the model now; its requests fail."""
        if (client := self._client) is not None:
            self._is_closing = True
            self.keep_alive_s = self._policy.keep_alive_s
            try:
                await asyncio.to_thread(client.close)
            finally:
                self._client, self._is_closing = None, False

    def _count(self, event: Event, began_s: float, record: RequestRecord) -> None:
        if isinstance(event, Finished):
            record.add(event)
            self._server_metrics.add(self.name, event, monotonic() - began_s)
        elif isinstance(event, Notice):
            self._server_metrics.notice(event.text)

    def _note_death(self, death: Death) -> None:
        self._server_metrics.note_death(self.name, death)
