"""A LocalEngine for a command: opened with progress on stderr, read so that Ctrl-C cancels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from edgespec.cli.terminal import TerminalReporter, echo_native_log, interruptible
from edgespec.core.protocols import CheckCancelled
from edgespec.planner.plan import LoadConfig
from edgespec.service.local import LocalEngine, Work

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
    """As `run_work`, for work that itself waits for engines."""
    from edgespec.service.local import Worker

    worker = Worker()
    try:
        yield from interruptible(worker.submit(work))
    finally:
        worker.close()
