"""Work in a process of its own, for what llama.cpp may end the process over or does not let itself be stopped in."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr
from multiprocessing import active_children, get_context, resource_tracker
from typing import Any, TypeVar

from edgespec.core.protocols import CheckCancelled
from edgespec.errors import Cancelled

T = TypeVar("T")
_POLL_S = 0.1


class ChildDied(Exception):
    """The process ended before its work was done."""


def in_child(
    work: Callable[..., T], *given: Any, check: CheckCancelled, meanwhile: Callable[[], None] = lambda: None
) -> T:
    """What `work` of an importable module returns for `given`; `meanwhile` is called a few times a second.

    Raises what it raises, ChildDied, Cancelled.
    """
    with starting(), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        running = pool.submit(work, *given)
        while not running.done():
            wait([running], timeout=_POLL_S)
            try:
                check()
                meanwhile()
            except Cancelled:
                for process in active_children():
                    process.terminate()
                raise
        try:
            return running.result()
        except BrokenProcessPool:
            raise ChildDied from None


@contextmanager
def starting() -> Iterator[None]:
    """For processes to be started in: Ctrl-C stays this one's alone, as they inherit what is blocked."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    with redirect_stderr(sys.__stderr__):  # what a full screen puts in its place has no descriptor to inherit
        resource_tracker.ensure_running()  # a process needs it, and its start unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
