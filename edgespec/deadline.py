"""A time limit for calls of code that is not this program's, on the thread that calls it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from time import monotonic, sleep

_LOOK_S = 0.25


class TookTooLong(BaseException):
    """Raised inside the block of `time_limit`. Not an Exception, so that a loop that goes on after errors ends too."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TookTooLong in the block, at most a quarter of a second after `seconds` have passed.

    Python is interrupted between two of its instructions: a call of native code, such as time.sleep, ends first, if it
    ends. Blocks of one thread may not be nested.
    """
    watch, thread = _watch(), threading.get_ident()
    watch.begin(thread, monotonic() + seconds)
    try:
        try:
            yield
        finally:
            watch.end(thread)
    except TookTooLong:
        watch.end(thread)  # it may have come within the first call, which had not ended the block yet
        raise


class _Watch:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, float] = {}  # of the blocks, by their threads
        threading.Thread(target=self._look, name="edgespec-deadline", daemon=True).start()

    def begin(self, thread: int, end_s: float) -> None:
        with self._lock:
            self._ends[thread] = end_s

    def end(self, thread: int) -> None:
        with self._lock:
            if self._ends.pop(thread, monotonic()) <= monotonic():
                _raise_in(thread, None)  # it may have been raised, but not yet arrived

    def _look(self) -> None:
        while True:
            sleep(_LOOK_S)
            with self._lock:
                for thread, end_s in self._ends.items():
                    if end_s <= monotonic():
                        _raise_in(thread, TookTooLong)


@cache
def _watch() -> _Watch:
    return _Watch()


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error) if error else None)
