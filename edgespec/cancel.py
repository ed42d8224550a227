"""Cancellation of the work that runs in the present context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Final, TypeVar

from edgespec.errors import Cancelled

T = TypeVar("T")
Check = Callable[[], None]
"""Raises Cancelled if nobody wants the work any more; polled often, so it is quick."""

_check: ContextVar[Check] = ContextVar("check", default=lambda: None)
_END: Final = object()


def check_cancelled() -> None:
    """Poll the check of the work that runs. Raises Cancelled."""
    _check.get()()


def is_cancelled() -> bool:
    """Whether `check_cancelled` would raise Cancelled, for callers that may not raise: callbacks of native code."""
    try:
        check_cancelled()
    except Cancelled:
        return True
    return False


def current_check() -> Check:
    """The check of the work that runs, for whoever goes on with it in another context."""
    return _check.get()


@contextmanager
def cancellable(check: Check) -> Iterator[None]:
    """Work inside polls `check` instead of the present one.

    Not for generators that yield inside: a context variable that they set stays set for whoever advances them. See
    `iterate`.
    """
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def iterate(events: Iterator[T], check: Check) -> Iterator[T]:
    """`events`, each step of which polls `check`: generators that take turns on a thread are cancelled apart.

    They run in a copy of the present context, so what is set in it now, such as a reporter, holds for them.
    """
    context = copy_context()
    context.run(_check.set, check)
    return _advance(events, context)


def _advance(events: Iterator[T], context: Context) -> Iterator[T]:
    try:
        while (event := context.run(next, events, _END)) is not _END:
            yield event  # type: ignore[misc]
    finally:
        if (close := getattr(events, "close", None)) is not None:
            context.run(close)
