"""Progress and notices of the work that runs in the present context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Protocol


class Reporter(Protocol):
    """Receives the progress of a load."""

    def notice(self, text: str) -> None:
        """One sentence for the user, such as why a draft was rejected."""

    def download(self, name: str, done: int, total: int) -> None:
        """`done` of `total` bytes of a file are downloaded."""

    def loading(self, name: str, fraction: float) -> None:
        """`fraction` of a model is loaded, 0.0 to 1.0."""


class Quiet:
    """A Reporter that says nothing."""

    def notice(self, text: str) -> None: ...

    def download(self, name: str, done: int, total: int) -> None: ...

    def loading(self, name: str, fraction: float) -> None: ...


QUIET = Quiet()
_reporter: ContextVar[Reporter] = ContextVar("reporter", default=QUIET)
_load: ContextVar[Callable[[float], None]] = ContextVar("load", default=lambda fraction: None)


@contextmanager
def reporting(reporter: Reporter) -> Iterator[None]:
    """Work inside reports to `reporter`. Not for generators that yield inside, as `cancel.cancellable`."""
    token = _reporter.set(reporter)
    try:
        yield
    finally:
        _reporter.reset(token)


@contextmanager
def loading(name: str) -> Iterator[None]:
    """What is loaded inside is called `name`, unless it has a name of its own."""
    token = _load.set(partial(_reporter.get().loading, name))
    try:
        yield
    finally:
        _load.reset(token)


def notice(text: str) -> None:
    """Tell the user one sentence, such as why a draft was rejected."""
    _reporter.get().notice(text)


def report_download(name: str, done: int, total: int) -> None:
    """`done` of `total` bytes of a file are downloaded."""
    _reporter.get().download(name, done, total)


def report_loaded(fraction: float) -> None:
    """`fraction` of what is being loaded is there, 0.0 to 1.0. Nobody hears of it outside of `loading`."""
    _load.get()(fraction)
