"""Messages that the readers of jobs post to the app."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textual.app import App
from textual.message import Message

from edgespec.engine.events import Event
from edgespec.errors import Cancelled, EdgespecError
from edgespec.files import save_traceback
from edgespec.planner.plan import LoadConfig
from edgespec.service.client import ModelInfo, Stream
from edgespec.tui.turns import Item
from edgespec.units import gib

FRAME_S = 1 / 30
_REST_FACTOR = 9  # rest over the CPU time of a frame: drawing takes at most a tenth of a core
_MAX_REST_S = 0.25


class Batch(Message):
    """Events of the current generation. The handler marks the batch as shown, and sets the redraw interval."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self.events = events
        self._shown = asyncio.Event()
        self._rest_s = 0.0

    def mark_shown(self, drawn_s: float) -> None:
        """`drawn_s`: the CPU time of the frame. The model may need every core, so the screen rests after it."""
        self._rest_s = max(FRAME_S, min(_MAX_REST_S, drawn_s * _REST_FACTOR))
        self._shown.set()

    @property
    def is_shown(self) -> bool:
        return self._shown.is_set()

    async def wait(self) -> None:
        """Wait until the batch is shown and the redraw interval is over."""
        await self._shown.wait()
        await asyncio.sleep(self._rest_s)


@dataclass(eq=False)
class BranchClicked(Message):
    """The user clicked on the arrows of a message; `by` is -1 or 1."""

    item: Item
    by: int


@dataclass(eq=False)
class ModelReady(Message):
    """A model, or another draft for the same model, is loaded.

    notices  those of the load
    is_new   the model changed, not only its draft
    """

    model_info: ModelInfo
    request: LoadConfig
    notices: Sequence[str]
    is_new: bool


@dataclass(eq=False)
class Toast(Message):
    """A sentence for the user; `hint` names the next action, `kind` is "note" or "error".

    stays   it is shown in the conversation; else in a corner of the screen for some seconds
    """

    text: str
    hint: str = ""
    kind: str = "note"
    stays: bool = False

    def __str__(self) -> str:
        return f"{self.text} {self.hint}".strip()

    @classmethod
    def from_error(cls, error: BaseException, *, stays: bool = False) -> Toast:
        """Describe the error that ended a job. An unexpected one is written to a log file, which the hint names."""
        if isinstance(error, Cancelled):
            return cls("stopped.")
        if isinstance(error, EdgespecError):
            return cls(error.message, error.hint, "error", stays)
        path = save_traceback(error)
        text = f"internal error: {type(error).__name__}: {error}."
        return cls(text, f"Please report it, with {path}.", "error", stays)


@dataclass(eq=False)
class ProgressChanged(Message):
    """A download or load made progress; `fraction` is between 0 and 1."""

    text: str
    fraction: float


@dataclass(eq=False)
class JobEnded(Message):
    """A job is over, successfully or not."""

    job: Stream[Any]


# Progress of a load as messages to the app.


class TuiReporter:
    """A planner.plan.Reporter that shows notices and progress on the screen; safe to call from any thread.

    It keeps the notices.
    """

    def __init__(self, app: App[None]) -> None:
        self.notices: list[str] = []
        self._app = app

    def notice(self, text: str) -> None:
        self.notices.append(text)
        self._app.post_message(Toast(text))

    def download(self, name: str, done: int, total: int) -> None:
        text = f"downloading {Path(name).name} {gib(done)} of {gib(total)}"
        self._app.post_message(ProgressChanged(text, done / total if total else 0.0))

    def loading(self, name: str, fraction: float) -> None:
        self._app.post_message(ProgressChanged(f"loading {Path(name).name}", fraction))
