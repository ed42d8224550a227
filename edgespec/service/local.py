"""The engine on a worker thread of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakSet

import psutil

from edgespec.backends import device_memory, prefers_mlx
from edgespec.backends.devices import DeviceMemory
from edgespec.controller.stats import DraftStats
from edgespec.conversations.chat import change_speculation
from edgespec.core.batching import Yield
from edgespec.core.protocols import CheckCancelled
from edgespec.engine.drafting import Speculation
from edgespec.engine.embeddings import Embedding, embed
from edgespec.engine.events import Event, Request
from edgespec.errors import EdgespecError
from edgespec.hub.hub import Hub
from edgespec.planner.plan import LoadConfig, Reporter
from edgespec.planner.report import outlook
from edgespec.registry.schema import load_registry
from edgespec.service.client import ModelInfo, require_model
from edgespec.service.load import LoadedModel, change_draft, load_engine
from edgespec.service.worker import Job, Worker
from edgespec.text.chat_template import Message

T = TypeVar("T")


class LocalEngine:
    """A Stage on a worker thread of this process."""

    def __init__(self) -> None:
        self._worker = Worker()
        self._jobs: WeakSet[Job[Any]] = WeakSet()
        self._devices: tuple[DeviceMemory, ...] = ()
        self.loaded: LoadedModel | None = None

    @property
    def model_info(self) -> ModelInfo | None:
        if (loaded := self.loaded) is None:
            return None
        engine = loaded.engine
        return ModelInfo(
            loaded.name,
            loaded.backend,
            loaded.draft,
            loaded.sampling,
            engine.target.chat_template,
            loaded.fit,
            loaded.plain_speed,
            engine.target.context_size,
            engine.speculation,
            engine.is_paused,
            self._devices,
            engine.max_concurrency,
            engine.target.no_batching_reason,
        )

    @property
    def resident(self) -> int:
        return int(psutil.Process().memory_info().rss)

    def open(self, request: LoadConfig, reporter: Reporter) -> Job[ModelInfo]:
        def work(check: CheckCancelled) -> Iterator[ModelInfo]:
            self._close()
            self.loaded = load_engine(request, load_registry(), Hub.from_environment(), reporter, check)
            yield self._looked()

        return self.submit(work)

    def change_draft(self, request: LoadConfig, reporter: Reporter) -> Job[ModelInfo]:
        def work(check: CheckCancelled) -> Iterator[ModelInfo]:
            hub = Hub.from_environment()
            self.loaded = change_draft(self._required(), request, load_registry(), hub, reporter, check)
            yield self._looked()

        return self.submit(work)

    def stream(self, request: Request, speculation: Speculation | None = None) -> Job[Event]:
        def work(check: CheckCancelled) -> Iterator[Event | Yield]:
            try:
                yield from self._required().engine.generate(request, check, speculation)
            finally:
                self._looked()

        return self.submit(work, shares=True)

    def outlook(self, request: LoadConfig, reporter: Reporter) -> Job[str]:
        def work(check: CheckCancelled) -> Iterator[str]:
            yield from outlook(request, load_registry(), Hub.from_environment(), reporter, check)

        return self.submit(work)

    def speculate(self, argument: str) -> ModelInfo:
        change_speculation(self._required().engine, argument)
        return require_model(self)

    def draft_stats(self) -> DraftStats | None:
        engine = self._required().engine
        return engine.draft_stats if engine.has_draft_stats else None

    def count(self, prompt: str | tuple[Message, ...], variables: Mapping[str, Any]) -> Job[int]:
        def work(check: CheckCancelled) -> Iterator[int]:  # on the worker, since some tokenizers need its stack
            yield len(self._required().engine.encode(prompt, variables))

        return self.submit(work, shares=True)

    def embed(self, texts: Sequence[str | Sequence[int]]) -> Job[Embedding]:
        def work(check: CheckCancelled) -> Iterator[Embedding | Yield]:
            yield from embed(self._required().engine.target, texts, check)

        return self.submit(work, shares=True)

    def devices(self) -> tuple[DeviceMemory, ...]:
        return device_memory("mlx" if prefers_mlx() else "llamacpp")

    def close(self) -> None:
        for job in tuple(self._jobs):
            job.cancel()
        self._worker.call(self._close)
        self._worker.close()

    def submit(self, work: Callable[[CheckCancelled], Iterator[T | Yield]], *, shares: bool = False) -> Job[T]:
        """Other work for the thread that owns the models; `close` stops it too."""
        job = self._worker.submit(work, shares=shares)
        self._jobs.add(job)
        return job

    def _required(self) -> LoadedModel:
        require_model(self)
        assert self.loaded is not None
        return self.loaded

    def _close(self) -> None:
        loaded, self.loaded = self.loaded, None
        if loaded is not None:
            loaded.keep()
            loaded.engine.close()

    def _looked(self) -> ModelInfo:
        """With what is free on the accelerators now."""
        with suppress(EdgespecError):
            loaded = self._required()
            self._devices = device_memory(loaded.backend)
            self._worker.max_concurrency = loaded.engine.max_concurrency
        return require_model(self)
