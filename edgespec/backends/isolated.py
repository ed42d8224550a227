"""Runs a function in a process of its own: for native code that may abort, or that cannot be interrupted."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from subprocess import PIPE, Popen, TimeoutExpired
from tempfile import TemporaryFile
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

    The main module of the program is not imported again, as multiprocessing does: a script that has no guard for that
    may call this too. Raises what `work` raises, ChildDied, Cancelled.
    """
    with TemporaryFile() as call:
        pickle.dump((work, args), call)
        call.seek(0)
        with block_sigint(), Popen(python_command(serve_once), stdin=call, stdout=PIPE) as child:
            while True:
                try:
                    answer, _ = child.communicate(timeout=_POLL_S)
                    break
                except TimeoutExpired:
                    pass
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


def python_command(function: Callable[[], None]) -> list[str]:
    """The command that calls an importable function in a process of its own.

    It finds modules where this process does, and none in the present folder, where a user may have a numpy.py.
    """
    path, name = [each for each in sys.path if each], function.__name__
    start = f"import sys; sys.path[:] = {path!r}; from {function.__module__} import {name}; {name}()"
    return [sys.executable, "-c", start]


def serve_once() -> None:
    """Run the call that arrives on stdin and write its outcome; what the function prints goes to stderr."""
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)
        work, args = pickle.load(sys.stdin.buffer)
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
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
