"""An open engine behind a worker thread, for commands that read its events with Ctrl-C in mind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from edgespec.cli.interrupts import interruptible
from edgespec.cli.terminal import TerminalReporter, echo_native_log
from edgespec.core.protocols import CheckCancelled
from edgespec.engine.events import Event, Request
from edgespec.planner.plan import LoadConfig
from edgespec.service.load import LoadedModel, Loader
from edgespec.service.worker import Worker

T = TypeVar("T")


def on_worker(work: Callable[[CheckCancelled], Iterator[T]]) -> Iterator[T]:
    """What `work` yields on a thread of its own that may use models; Ctrl-C asks it to stop, by way of its `check`."""
    worker = Worker()
    try:
        yield from _events(worker, work)
    finally:
        worker.close()


def _events(worker: Worker, work: Callable[[CheckCancelled], Iterator[T]]) -> Iterator[T]:
    job = worker.submit(work)
    try:
        with interruptible(job):
            yield from job
    finally:
        job.cancel()  # whoever reads may leave early


class Host:
    """Opens on construction. Raises any EdgespecError, and Cancelled when Ctrl-C stops the download or the loading."""

    def __init__(self, request: LoadConfig, *, verbose: bool) -> None:
        self._worker = Worker()
        self._verbose = verbose
        try:
            self.loaded = self._open(request)
        except BaseException:
            self._worker.close()
            raise

    def stream(self, request: Request) -> Iterator[Event]:
        """Events of one generation; Ctrl-C ends it with Finished("cancelled")."""
        yield from self.work(lambda check: self.loaded.engine.stream(request, check))

    def work(self, work: Callable[[CheckCancelled], Iterator[T]]) -> Iterator[T]:
        """What `work` yields on the thread that owns the models; Ctrl-C asks it to stop, by way of its `check`."""
        yield from _events(self._worker, work)

    def change_draft(self, request: LoadConfig) -> None:
        """Draft as `request` says, for the target that is open; what was open stays so if that fails."""
        loaded = self.loaded

        def work(check: CheckCancelled) -> Iterator[LoadedModel]:
            yield Loader(TerminalReporter(), check).change_draft(loaded, request)

        (self.loaded,) = self.work(work)

    def close(self) -> None:
        self._worker.call(self.loaded.save_stats)
        self._worker.call(self.loaded.engine.close)
        self._worker.close()

    def _open(self, request: LoadConfig) -> LoadedModel:
        def work(check: CheckCancelled) -> Iterator[LoadedModel]:
            if self._verbose:
                echo_native_log()
            yield Loader(TerminalReporter(), check).load(request)

        (loaded,) = self.work(work)
        return loaded
