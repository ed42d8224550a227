"""An engine that is asked for work: models opened, answers generated, speeds foretold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import psutil

from edgespec.backends import BackendName, device_memory, prefers_mlx
from edgespec.chat import change_speculation
from edgespec.control.experience import Experience
from edgespec.core.company import Pause
from edgespec.core.protocols import CheckCancelled
from edgespec.embedding import Embedding, embed
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.events import Event, Request
from edgespec.opening import Opened, change_draft, open_engine
from edgespec.outlook import outlook
from edgespec.planning import OpenRequest, Reporter
from edgespec.registry.fit import DeviceMemory, Fit
from edgespec.registry.hub import Hub
from edgespec.registry.schema import SamplingDefaults, load_registry
from edgespec.speculation import Speculation
from edgespec.text.chat import Message
from edgespec.worker import Job, Worker

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Standing:
    """What is open, in words and numbers that can be handed on.

    draft        'none', 'ngram', the draft model's name, or how the target drafts for itself
    template     the model's chat template, as it came with the model
    fit          what was foretold of memory; None for the toy runtime
    plain_speed  tokens a second of plain decoding, once that has been measured
    devices      accelerators with their free memory
    at_once      answers that may be under way at a time
    unshared     why answers do not share their forwards; None where they do
    """

    name: str
    backend: BackendName
    draft: str
    sampling: SamplingDefaults
    template: str | None
    fit: Fit | None
    plain_speed: float | None
    context_size: int
    speculation: Speculation
    is_paused: bool
    devices: tuple[DeviceMemory, ...]
    at_once: int
    unshared: str | None


class Stage(Protocol):
    """Jobs are queued at once and done in order, up to `at_once` answers together; the other methods answer while a job
    is under way.

    `standing` is None where no model is open. Work that needs one raises InvalidRequest.
    """

    @property
    def standing(self) -> Standing | None: ...

    @property
    def resident(self) -> int:
        """Bytes of memory that this program takes."""

    def open(self, request: OpenRequest, reporter: Reporter) -> Job[Standing]:
        """Open a model in place of the present one, which is closed first: two may not fit in memory."""

    def change_draft(self, request: OpenRequest, reporter: Reporter) -> Job[Standing]:
        """On failure the present draft stays."""

    def stream(self, request: Request, speculation: Speculation | None = None) -> Job[Event]:
        """One generation, with another way to draft for it alone where one is given."""

    def outlook(self, request: OpenRequest, reporter: Reporter) -> Job[str]:
        """What `edgespec plan` says of a model: facts at once, speeds after a measurement."""

    def speculate(self, argument: str) -> Standing:
        """What `/spec` asks for, amid an answer too. Raises InvalidRequest."""

    def experience(self) -> Experience | None:
        """What the autopilot knows; nothing before it has measured."""

    def count(self, prompt: str | tuple[Message, ...], variables: Mapping[str, Any]) -> Job[int]:
        """Tokens that a prompt takes."""

    def embed(self, texts: Sequence[str | Sequence[int]]) -> Job[Embedding]:
        """A vector for each text."""

    def devices(self) -> tuple[DeviceMemory, ...]:
        """Accelerators that a model would run on."""

    def close(self) -> None:
        """Stop what is under way, keep what was learned, free the model."""


def standing_of(stage: Stage) -> Standing:
    """Raises InvalidRequest where no model is open."""
    if stage.standing is None:
        raise InvalidRequest("no model is open.", hint="/model chooses one.")
    return stage.standing


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
