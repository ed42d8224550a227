"""A LocalEngine for a command: opened with progress on stderr, its answers read so that Ctrl-C cancels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeVar

from edgespec.cli.interrupts import finish, interruptible
from edgespec.cli.terminal import TerminalReporter, report_activity
from edgespec.client.local import LocalEngine
from edgespec.client.stream import Stream
from edgespec.client.worker import Work, Worker
from edgespec.core.metrics import ReadingClock
from edgespec.core.protocols import PrefillProgress, Step
from edgespec.engine.events import Event, Finished, Notice
from edgespec.models.load_config import LoadConfig
from edgespec.progress import Reporter, reporting
from edgespec.text.stream import Piece

T = TypeVar("T")


def open_engine(
    config: LoadConfig, *, verbose: bool = False, settings_s: float | None = None, reporter: Reporter | None = None
) -> LocalEngine:
    """Load a model; `settings_s`: see Loader. `reporter` is the terminal's by default.

    Raises any EdgespecError, and Cancelled when Ctrl-C stops the download or the load.
    """
    engine = LocalEngine()
    try:
        if verbose:
            engine.submit(_echo_native_log).result()  # on the thread that loads the runtime
        finish(engine.open(config, reporter or TerminalReporter(), settings_s=settings_s))
    except BaseException:
        engine.close()
        raise
    return engine


def _echo_native_log() -> Iterator[None]:
    """Print the runtime's own log to stderr from now on."""
    from edgespec.backends.llamacpp.library import library

    library().log.echo = True
    yield None


def run_work(work: Work[T], reporter: Reporter | None = None, *, is_training: bool = False) -> Iterator[T]:
    """Events of `work` on a thread that may use models; Ctrl-C cancels it. It reports to the terminal by default.

    Trainings wait for it to end, unless it `is_training` itself.
    """
    with closing(Worker() if is_training else LocalEngine()) as worker:
        with reporting(reporter or TerminalReporter()):
            stream = worker.submit(work)
        yield from interruptible(stream)


@dataclass
class Answer:
    """An answer as it comes: its texts by channel, its steps, and what is to be said after it."""

    texts: dict[str, str]
    steps: list[Step] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    finished: Finished | None = None
    _clock: ReadingClock = field(default_factory=lambda: ReadingClock(perf_counter()))

    def read(self, events: Stream[Event], show: Callable[[Piece], object]) -> Finished:
        """Collect the events and show each piece; Ctrl-C cancels. Returns the last event.

        On a terminal it shows how far a long prompt has been read.
        """
        is_reading = False
        for event in interruptible(events):
            if isinstance(event, PrefillProgress) and event.done < event.total:
                is_reading = True
                report_activity(f"reading {self._clock.add(event, perf_counter())}")
                continue
            if is_reading:
                is_reading = False
                report_activity("")
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
