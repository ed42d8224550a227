"""Ctrl-C while a job runs: the first stops the job, which still says its last words; the second ends the program."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.service.worker import Job

INTERRUPTED = 130  # the shells' exit code for an end by Ctrl-C


@contextmanager
def interruptible(job: Job[Any]) -> Iterator[None]:
    """Within the block SIGINT belongs to the job. A handler that only sets a flag works inside native calls too."""
    presses = 0

    def on_interrupt(_signal: int, _frame: object) -> None:
        nonlocal presses
        presses += 1
        if presses == 1:
            job.cancel()
            return
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # native code may be in the middle of a forward: there is nothing to wait for

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
