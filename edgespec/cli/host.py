"""An open engine behind a worker thread, for commands that read its events with Ctrl-C in mind."""

from __future__ import annotations

from collections.abc import Iterator

from edgespec.cli.interrupts import interruptible
from edgespec.cli.terminal import TerminalReporter, echo_native_log
from edgespec.core.protocols import CheckCancelled
from edgespec.engine import Event, Request
from edgespec.opening import Opened, open_engine
from edgespec.planning import OpenRequest
from edgespec.registry.hub import Hub
from edgespec.registry.schema import load_registry
from edgespec.worker import Worker


class Host:
    """Opens on construction. Raises any EdgespecError, and Cancelled when Ctrl-C stops the download or the loading."""

    def __init__(self, request: OpenRequest, *, verbose: bool) -> None:
        self._worker = Worker()
        self._verbose = verbose
        self.opened = self._open(request)

    def stream(self, request: Request) -> Iterator[Event]:
        """Events of one generation; Ctrl-C ends it with Finished("cancelled")."""
        job = self._worker.submit(lambda check: self.opened.engine.stream(request, check))
        with interruptible(job):
            yield from job

    def replace(self, request: OpenRequest) -> None:
        """Open something else; what was open stays open if that fails."""
        before = self.opened
        self.opened = self._open(request)
        self._worker.call(before.engine.close)

    def close(self) -> None:
        self._worker.call(self.opened.engine.close)
        self._worker.close()

    def _open(self, request: OpenRequest) -> Opened:
        def work(check: CheckCancelled) -> Iterator[Opened]:
            if self._verbose:
                echo_native_log()
            yield open_engine(request, load_registry(), Hub.from_environment(), TerminalReporter(), check)

        job = self._worker.submit(work)
        with interruptible(job):
            (opened,) = job
        return opened
