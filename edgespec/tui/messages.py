"""What workers tell the app."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import sleep
from typing import Any

from textual.message import Message

from edgespec.engine.events import Event
from edgespec.errors import Cancelled, EdgespecError
from edgespec.files import save_traceback
from edgespec.planner.plan import LoadConfig
from edgespec.service.client import ModelInfo
from edgespec.service.worker import Job


class Batch(Message):
    """Events of the generation that is going on. Whoever shows it says how long the screen may rest then."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self.events = events
        self._shown = threading.Event()
        self._rest_s = 0.0

    def shown(self, rest_s: float) -> None:
        self._rest_s = rest_s
        self._shown.set()

    @property
    def is_shown(self) -> bool:
        return self._shown.is_set()

    def wait(self, is_running: Callable[[], bool]) -> None:
        """Until it is shown and the screen has rested, or nothing will be shown any more."""
        while is_running() and not self._shown.wait(0.1):
            pass
        sleep(self._rest_s)


class Ready(Message):
    """A model, or another draft for it, is open."""

    def __init__(self, model_info: ModelInfo, request: LoadConfig, *, is_new: bool) -> None:
        super().__init__()
        self.model_info = model_info
        self.request = request
        self.is_new = is_new


class Toast(Message):
    """A sentence for the user; `hint` is the next thing to do."""

    def __init__(self, text: str, hint: str = "", kind: str = "note") -> None:
        super().__init__()
        self.text = text
        self.hint = hint
        self.kind = kind

    def __str__(self) -> str:
        return f"{self.text} {self.hint}".strip()


class Progressed(Message):
    """How far a download or a load is."""

    def __init__(self, text: str, fraction: float) -> None:
        super().__init__()
        self.text = text
        self.fraction = fraction


class Ended(Message):
    """A job is over, well or not."""

    def __init__(self, job: Job[Any]) -> None:
        super().__init__()
        self.job = job


def toast_of(error: BaseException) -> Toast:
    """What ended a job, in words."""
    if isinstance(error, Cancelled):
        return Toast("stopped.")
    if isinstance(error, EdgespecError):
        return Toast(error.message, error.hint, "error")
    return _bug(error)


def _bug(error: BaseException) -> Toast:
    """A fault of ours, which must not take the conversation with it."""
    hint = f"Please report it, with {save_traceback(error)}."
    return Toast(f"internal error: {type(error).__name__}: {error}.", hint, "error")
