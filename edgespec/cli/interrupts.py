"""Ctrl-C while a job runs: the first press cancels the job, the second ends the program."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from edgespec.service.stream import Stream

T = TypeVar("T")

INTERRUPTED = 130  # the shells' exit code for Ctrl-C


def interruptible(stream: Stream[T]) -> Iterator[T]:
    """Events of `stream`. Until it ends, SIGINT cancels it; it is cancelled too when its reader leaves.

    The handler only sets a flag, so it is safe during native calls.
    """
    presses = 0

    def on_interrupt(_signal: int, _frame: object) -> None:
        nonlocal presses
        presses += 1
        if presses == 1:
            stream.cancel()
            return
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # a native forward cannot be interrupted in another way

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield from stream
    finally:
        signal.signal(signal.SIGINT, before)
        stream.cancel()
