"""The engine on a worker thread of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakSet

import psutil

from edgespec.backends import device_memory, prefers_mlx
from edgespec.backends.devices import DeviceMemory
from edgespec.controller.stats import Experience
from edgespec.conversations.chat import change_speculation
from edgespec.core.batching import Pause
from edgespec.core.protocols import CheckCancelled
from edgespec.engine.drafting import Speculation
from edgespec.engine.embeddings import Embedding, embed
from edgespec.engine.events import Event, Request
from edgespec.errors import EdgespecError
from edgespec.hub.hub import Hub
from edgespec.planner.plan import OpenRequest, Reporter
from edgespec.planner.report import outlook
from edgespec.registry.schema import load_registry
from edgespec.service.client import Standing, standing_of
from edgespec.service.load import Opened, change_draft, open_engine
from edgespec.service.worker import Job, Worker
from edgespec.text.chat_template import Message

T = TypeVar("T")


class Here:
    """A Stage on a worker thread of this process."""

    def __init__(self) -> None:
        self._worker = Worker()
        self._jobs: WeakSet[Job[Any]] = WeakSet()
        self._devices: tuple[DeviceMemory, ...] = ()
        self.opened: Opened | None = None

    @property
    def standing(self) -> Standing | None:
        if (opened := self.opened) is None:
            return None
        engine = opened.engine
        return Standing(
            opened.name,
            opened.backend,
            opened.draft,
            opened.sampling,
            engine.target.chat_template,
            opened.fit,
            opened.plain_speed,
            engine.target.context_size,
            engine.speculation,
            engine.is_paused,
            self._devices,
            engine.at_once,
            engine.target.unshared,
        )

    @property
    def resident(self) -> int:
        return int(psutil.Process().memory_info().rss)

    def open(self, request: OpenRequest, reporter: Reporter) -> Job[Standing]:
        def work(check: CheckCancelled) -> Iterator[Standing]:
            self._close()
            self.opened = open_engine(request, load_registry(), Hub.from_environment(), reporter, check)
            yield self._looked()

        return self.submit(work)

    def change_draft(self, request: OpenRequest, reporter: Reporter) -> Job[Standing]:
        def work(check: CheckCancelled) -> Iterator[Standing]:
            hub = Hub.from_environment()
            self.opened = change_draft(self._required(), request, load_registry(), hub, reporter, check)
            yield self._looked()

        return self.submit(work)

    def stream(self, request: Request, speculation: Speculation | None = None) -> Job[Event]:
        def work(check: CheckCancelled) -> Iterator[Event | Pause]:
            try:
                yield from self._required().engine.generate(request, check, speculation)
            finally:
                self._looked()

        return self.submit(work, shares=True)

    def outlook(self, request: OpenRequest, reporter: Reporter) -> Job[str]:
        def work(check: CheckCancelled) -> Iterator[str]:
            yield from outlook(request, load_registry(), Hub.from_environment(), reporter, check)

        return self.submit(work)

    def speculate(self, argument: str) -> Standing:
        change_speculation(self._required().engine, argument)
        return standing_of(self)

    def experience(self) -> Experience | None:
        engine = self._required().engine
        return engine.experience if engine.has_experience else None

    def count(self, prompt: str | tuple[Message, ...], variables: Mapping[str, Any]) -> Job[int]:
        def work(check: CheckCancelled) -> Iterator[int]:  # on the worker, since some tokenizers need its stack
            yield len(self._required().engine.encode(prompt, variables))

        return self.submit(work, shares=True)

    def embed(self, texts: Sequence[str | Sequence[int]]) -> Job[Embedding]:
        def work(check: CheckCancelled) -> Iterator[Embedding | Pause]:
            yield from embed(self._required().engine.target, texts, check)

        return self.submit(work, shares=True)

    def devices(self) -> tuple[DeviceMemory, ...]:
        return device_memory("mlx" if prefers_mlx() else "llamacpp")

    def close(self) -> None:
        for job in tuple(self._jobs):
            job.cancel()
        self._worker.call(self._close)
        self._worker.close()

    def submit(self, work: Callable[[CheckCancelled], Iterator[T | Pause]], *, shares: bool = False) -> Job[T]:
        """Other work for the thread that owns the models; `close` stops it too."""
        job = self._worker.submit(work, shares=shares)
        self._jobs.add(job)
        return job

    def _required(self) -> Opened:
        standing_of(self)
        assert self.opened is not None
        return self.opened

    def _close(self) -> None:
        opened, self.opened = self.opened, None
        if opened is not None:
            opened.keep()
            opened.engine.close()

    def _looked(self) -> Standing:
        """With what is free on the accelerators now."""
        with suppress(EdgespecError):
            opened = self._required()
            self._devices = device_memory(opened.backend)
            self._worker.at_once = opened.engine.at_once
        return standing_of(self)
