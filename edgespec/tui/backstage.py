"""The engine behind the screen: jobs on the worker thread, which the app reads in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakSet

from edgespec.backends import device_memory
from edgespec.core.protocols import CheckCancelled
from edgespec.engine import Event, Request
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.opening import Opened, change_draft, open_engine
from edgespec.outlook import outlook
from edgespec.planning import OpenRequest, Reporter
from edgespec.registry.fit import DeviceMemory
from edgespec.registry.hub import Hub
from edgespec.registry.schema import load_registry
from edgespec.speculation import Speculation
from edgespec.worker import Job, Worker

T = TypeVar("T")


class Backstage:
    """One worker thread and the engine that is open on it, if any. Methods return at once; jobs do the work.

    `devices` is what the last job found of accelerators.
    """

    def __init__(self) -> None:
        self._worker = Worker()
        self._jobs: WeakSet[Job[Any]] = WeakSet()
        self.opened: Opened | None = None
        self.devices: tuple[DeviceMemory, ...] = ()

    def open(self, request: OpenRequest, reporter: Reporter) -> Job[Opened]:
        """Open a model in place of the present one, which is closed first: two may not fit in memory."""

        def work(check: CheckCancelled) -> Iterator[Opened]:
            self._close()
            self.opened = open_engine(request, load_registry(), Hub.from_environment(), reporter, check)
            self._look_at_devices()
            yield self.opened

        return self._submit(work)

    def change_draft(self, request: OpenRequest, reporter: Reporter) -> Job[Opened]:
        """On failure the present draft stays."""

        def work(check: CheckCancelled) -> Iterator[Opened]:
            assert self.opened is not None
            hub = Hub.from_environment()
            self.opened = change_draft(self.opened, request, load_registry(), hub, reporter, check)
            self._look_at_devices()
            yield self.opened

        return self._submit(work)

    def stream(self, request: Request, speculation: Speculation | None = None) -> Job[Event]:
        """One generation, with another way to draft for it alone where one is given."""

        def work(check: CheckCancelled) -> Iterator[Event]:
            assert self.opened is not None
            engine = self.opened.engine
            before = engine.speculation
            engine.speculation = speculation or before
            try:
                yield from engine.stream(request, check)
            finally:
                if speculation is not None:
                    engine.speculation = before
                self._look_at_devices()

        return self._submit(work)

    def outlook(self, request: OpenRequest, reporter: Reporter) -> Job[str]:
        """What `edgespec plan` says of a model: facts at once, speeds after a measurement."""

        def work(check: CheckCancelled) -> Iterator[str]:
            yield from outlook(request, load_registry(), Hub.from_environment(), reporter, check)

        return self._submit(work)

    def require(self) -> Opened:
        """Raises InvalidRequest where no model is open."""
        if self.opened is None:
            raise InvalidRequest("no model is open.", hint="/model chooses one.")
        return self.opened

    def close(self) -> None:
        """Stop what is under way, keep what was learned, free the model, end the thread."""
        for job in tuple(self._jobs):
            job.cancel()
        self._worker.call(self._close)
        self._worker.close()

    def _submit(self, work: Callable[[CheckCancelled], Iterator[T]]) -> Job[T]:
        job = self._worker.submit(work)
        self._jobs.add(job)
        return job

    def _close(self) -> None:
        opened, self.opened = self.opened, None
        if opened is not None:
            opened.keep()
            opened.engine.close()

    def _look_at_devices(self) -> None:
        with suppress(EdgespecError):
            self.devices = device_memory(self.opened.backend) if self.opened is not None else ()
