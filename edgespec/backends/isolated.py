"""Runs a function in a process of its own: for native code that may abort, or that cannot be interrupted."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from multiprocessing import resource_tracker
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any, TypeVar

from edgespec.core.protocols import CheckCancelled
from edgespec.errors import Cancelled

T = TypeVar("T")
_POLL_S = 0.1
_COMMAND = (sys.executable, "-c", f"from {__name__} import serve_once; serve_once()")


class ChildDied(Exception):
    """The process ended before `work` returned."""


def run_in_child(
    work: Callable[..., T], *args: Any, check: CheckCancelled, on_poll: Callable[[], None] = lambda: None
) -> T:
    """The result of `work`, an importable function, for `args`. Calls `check` and `on_poll` 10 times a second.

    The main module of the program is not imported again, as multiprocessing does: a script that has no guard for that
    may call this too. Raises what `work` raises, ChildDied, Cancelled.
    """
    call: bytes | None = pickle.dumps((sys.path, work, args))
    with block_sigint(), Popen(_COMMAND, stdin=PIPE, stdout=PIPE) as child:
        while True:
            try:
                answer, _ = child.communicate(call, timeout=_POLL_S)
                break
            except TimeoutExpired:
                call = None
            try:
                check()
                on_poll()
            except Cancelled:
                child.terminate()
                raise
    if child.returncode or not answer:
        raise ChildDied
    result, error = pickle.loads(answer)
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def serve_once() -> None:
    """Run the call that arrives on stdin and write its outcome; what the function prints goes to stderr."""
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)
        sys.path, work, args = pickle.load(sys.stdin.buffer)
        outcome: tuple[Any, Exception | None]
        try:
            outcome = (work(*args), None)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            outcome = (None, error)
        pickle.dump(outcome, output)


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
