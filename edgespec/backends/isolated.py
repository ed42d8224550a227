"""Runs a function in a process of its own: for native code that may abort, or that cannot be interrupted."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr
from multiprocessing import get_context, resource_tracker
from typing import Any, TypeVar

from edgespec.core.protocols import CheckCancelled
from edgespec.errors import Cancelled

T = TypeVar("T")
_POLL_S = 0.1


class ChildDied(Exception):
    """The process ended before `work` returned."""


def run_in_child(
    work: Callable[..., T], *args: Any, check: CheckCancelled, on_poll: Callable[[], None] = lambda: None
) -> T:
    """The result of `work`, an importable function, for `args`. Calls `check` and `on_poll` 10 times a second.

    Raises what `work` raises, ChildDied, Cancelled.
    """
    with block_sigint(), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        running = pool.submit(work, *args)
        while not running.done():
            wait([running], timeout=_POLL_S)
            try:
                check()
                on_poll()
            except Cancelled:
                for process in pool._processes.values():  # other children of this process go on, such as an engine
                    process.terminate()
                raise
        try:
            return running.result()
        except BrokenProcessPool:
            raise ChildDied from None


@contextmanager
def block_sigint() -> Iterator[None]:
    """Processes started inside inherit a blocked SIGINT, so that Ctrl-C reaches this process alone."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    with redirect_stderr(sys.__stderr__):  # a full-screen terminal replaces it by one without a descriptor
        resource_tracker.ensure_running()  # its start unblocks signals, so it comes first
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
