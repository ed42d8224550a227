"""Ctrl-C while a job runs: the first press cancels the job, the second ends the program."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, TypeVar

from edgespec.errors import Cancelled

if TYPE_CHECKING:
    from edgespec.client.stream import Stream


T = TypeVar("T")
INTERRUPTED = 130  # the shells' exit code for Ctrl-C


class Presses:
    """Counts the presses of Ctrl-C. A parent that waits for this process passes on those that it gets, and may have got
    the same ones: there were as many as the larger of both numbers.
    """

    def __init__(self) -> None:
        self._received = 0  # by this process, those that were passed on among them
        self._passed_on = 0
        self._known = 0

    def pass_on(self) -> None:
        """Repeat the parent's SIGINT."""
        self._passed_on += 1
        os.kill(os.getpid(), signal.SIGINT)

    def is_new(self) -> bool:
        """Whether the SIGINT that has come is another press, not a copy of one."""
        self._received += 1
        before, self._known = self._known, max(self._known, self._passed_on, self._received - self._passed_on)
        return self._known > before


PRESSES = Presses()


def finish(stream: Stream[Any]) -> None:
    """Let `stream` end, as `interruptible` does. Raises Cancelled even if SIGINT came too late to end it early."""
    events = interruptible(stream)
    while True:
        try:
            next(events)
        except StopIteration as end:
            if end.value:
                raise Cancelled from None
            return


def interruptible(stream: Stream[T]) -> Generator[T, None, bool]:
    """Events of `stream`. Until it ends, SIGINT cancels it, and another one ends this process; it is cancelled too when
    its reader leaves. Returns whether SIGINT came.

    The handler only sets a flag, so it is safe during native calls.
    """
    is_pressed = False

    def on_interrupt(_signal: int, _frame: object) -> None:
        nonlocal is_pressed
        if not PRESSES.is_new():
            return
        if is_pressed:
            sys.stdout.flush()
            os._exit(INTERRUPTED)  # a native forward cannot be interrupted in another way
        is_pressed = True
        stream.cancel()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield from stream
    finally:
        signal.signal(signal.SIGINT, before)
        stream.cancel()
    return is_pressed
