"""A LocalEngine for a command: opened with progress on stderr, its answers read so that Ctrl-C cancels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from edgespec.cli.terminal import TerminalReporter, echo_native_log, interruptible
from edgespec.core.protocols import CheckCancelled, Step
from edgespec.engine.events import Event, Finished, Notice
from edgespec.planner.plan import LoadConfig
from edgespec.service.client import Stream
from edgespec.service.local import LocalEngine, Work
from edgespec.text.stream import Piece

T = TypeVar("T")


def open_engine(config: LoadConfig, *, verbose: bool, settings_s: float | None = None) -> LocalEngine:
    """Load a model; `settings_s`: see Loader.

    Raises any EdgespecError, and Cancelled when Ctrl-C stops the download or the load.
    """
    engine = LocalEngine()

    def echo(_check: CheckCancelled) -> Iterator[None]:  # on the thread that loads the runtime
        echo_native_log()
        yield None

    try:
        if verbose:
            engine.submit(echo).result()
        list(interruptible(engine.open(config, TerminalReporter(), settings_s=settings_s)))
    except BaseException:
        engine.close()
        raise
    return engine


def run_work(work: Work[T]) -> Iterator[T]:
    """Events of `work` on a thread that may use models; Ctrl-C cancels it. Trainings wait for it to end."""
    engine = LocalEngine()
    try:
        yield from interruptible(engine.submit(work))
    finally:
        engine.close()


def run_training(work: Work[T]) -> Iterator[T]:
    """Do what `run_work` does, for work that itself waits for engines."""
    from edgespec.service.local import Worker

    worker = Worker()
    try:
        yield from interruptible(worker.submit(work))
    finally:
        worker.close()


@dataclass
class Answer:
    """An answer as it comes: its texts by channel, its steps, and what is to be said after it."""

    texts: dict[str, str]
    steps: list[Step] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    finished: Finished | None = None

    def read(self, events: Stream[Event], show: Callable[[Piece], object]) -> Finished:
        """Collect the events and show each piece; Ctrl-C cancels. Returns the last event."""
        for event in interruptible(events):
            if isinstance(event, Piece):
                self.texts[event.channel] += event.text
                show(event)
            elif isinstance(event, Step):
                self.steps.append(event)
            elif isinstance(event, Notice):
                self.notices.append(event.text)
            elif isinstance(event, Finished):
                self.finished = event
        assert self.finished is not None
        return self.finished
