"""What is being done: a download, a load, a prefill, or an answer that has no text yet; and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from textual import on, work
from textual.content import Content
from textual.message import Message
from textual.widgets import Static
from textual.worker import get_current_worker

from edgespec.cancel import cancellable
from edgespec.chat.tui.panel import draw_bar
from edgespec.chat.tui.transcript import Answer
from edgespec.client.stream import Stream
from edgespec.core.metrics import Meter
from edgespec.core.protocols import PrefillProgress, Step
from edgespec.engine.events import Event, Finished
from edgespec.errors import Cancelled, EdgespecError, NotReady
from edgespec.files import save_traceback
from edgespec.models.hub import Hub
from edgespec.models.load_config import LoadConfig
from edgespec.models.plan import fetch_all
from edgespec.models.registry import load_registry
from edgespec.progress import reporting
from edgespec.units import gib


@dataclass(eq=False)
class Toast(Message):
    """Sentences for the user from any thread; `kind` is "note" or "error".

    stays   they are shown in the conversation; else in a corner of the screen for some seconds
    """

    text: str
    kind: str = "note"
    stays: bool = False


# What a hint for the shell is in the chat.
_KEYS = (
    ("Run `edgespec list` to see", "Ctrl+G lists"),
    ("`edgespec list`", "Ctrl+G"),
    ("`edgespec history`", "Ctrl+R"),
)


def describe_error(error: BaseException) -> str:
    """Say what has ended some work, and the next step. An unexpected error is written to a log file, which is named."""
    if isinstance(error, EdgespecError):
        hint = error.hint
        for command, key in _KEYS:
            hint = hint.replace(command, key)
        return f"{error.message} {hint}".strip()
    path = save_traceback(error)
    return f"internal error: {type(error).__name__}: {error}. Please report it, with {path}."


@dataclass
class Activity:
    """The running job and the answer that it generates.

    job       None while the engine is idle
    answer    the widget that shows the answer; None unless one is being generated
    meter     of the current answer, else of the last one
    finished  the last event of that answer; None until it arrives, and after an error
    earlier   metrics of the part of the answer that an earlier job has generated
    """

    job: Stream[Any] | None = None
    answer: Answer | None = None
    meter: Meter = field(default_factory=Meter)
    finished: Finished | None = None
    earlier: Mapping[str, Any] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        if isinstance(event, Step):
            self.meter.add(event)
        elif isinstance(event, PrefillProgress):
            self.meter.add_progress(event, perf_counter())
        elif isinstance(event, Finished):
            self.finished = event

    def require_idle(self) -> None:
        """Check that no job runs; else raise NotReady."""
        if self.job is not None:
            raise NotReady("the engine is busy.", hint="Wait until it is done; Esc stops it.")


_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Progress(Static):
    """One line; hidden while there is nothing to show. `Changed` tells of progress, from any thread."""

    @dataclass(eq=False)
    class Changed(Message):
        """What `show` is to be called with."""

        text: str | None
        fraction: float | None = None

    def __init__(self, id: str = "progress") -> None:
        super().__init__("", id=id, markup=False)
        self._beats = count()
        self.display = False

    def show(self, text: str | None, fraction: float | None = None) -> None:
        """`fraction` is between 0 and 1; None without a bar. None as the text hides the line."""
        self.display = text is not None
        if text is not None:
            bar = "" if fraction is None else f"  {draw_bar(fraction, 12)} {fraction:.0%}"
            spinner = _SPINNER[next(self._beats) % len(_SPINNER)]
            self.update(Content.assemble((f"{spinner} {text}{bar}", "$text-accent"), "   Esc stops"))


def describe_wait(activity: Activity, elapsed_s: float) -> tuple[str | None, float | None]:
    """Text and fraction of the line; no text while the answer itself grows."""
    answer, meter = activity.answer, activity.meter
    if answer is None or answer.text:
        return None, None
    if answer.reasoning:
        return f"reasoning · {meter.emitted_tokens:,} tokens · {elapsed_s:.0f} s", None
    reading = meter.reading
    if reading is not None and not meter.steps and reading.progress.done < reading.progress.total:
        return f"reading {reading}", reading.progress.done / reading.progress.total
    return f"waiting for the first token · {elapsed_s:.0f} s", None


class TuiReporter:
    """A Reporter that shows progress in a line of the screen; safe to call from any thread.

    It keeps the notices.
    """

    def __init__(self, line: Progress, *, is_quiet: bool = False) -> None:
        """`is_quiet`: notices are not shown, since the load that follows tells them again."""
        self.notices: list[str] = []
        self._line = line
        self._is_quiet = is_quiet

    def notice(self, text: str) -> None:
        self.notices.append(text)
        if not self._is_quiet:
            self._line.post_message(Toast(text))

    def download(self, name: str, done: int, total: int) -> None:
        text = f"downloading {Path(name).name} {gib(done)} of {gib(total)}"
        self._line.post_message(Progress.Changed(text, done / total if total else 0.0))

    def loading(self, name: str, fraction: float) -> None:
        self._line.post_message(Progress.Changed(f"loading {Path(name).name}", fraction))


class Downloads(Progress):
    """A download beside the conversation: the model that is open goes on answering. Posts `Done` at its end."""

    @dataclass(eq=False)
    class Done(Message):
        """`request` can be opened without a download."""

        request: LoadConfig

    def __init__(self) -> None:
        super().__init__("download")

    @on(Progress.Changed)
    def _change(self, message: Progress.Changed) -> None:
        message.stop()
        self.show(message.text, message.fraction)

    def start(self, request: LoadConfig) -> None:
        """Download what `request` names, in place of a download under way."""
        self.show(f"asking the hub about {request.model} …")
        self._run(request)

    def cancel(self) -> bool:
        """Stop the download; returns whether there was one. What has arrived is kept, and used by the next one."""
        self.show(None)
        return bool(self.workers.cancel_node(self))

    @work(thread=True, exclusive=True, exit_on_error=False)
    def _run(self, request: LoadConfig) -> None:
        worker, reporter = get_current_worker(), TuiReporter(self, is_quiet=True)

        def check() -> None:
            if worker.is_cancelled:
                raise Cancelled

        try:
            with cancellable(check), reporting(reporter):
                fetch_all(request, load_registry(), Hub.from_environment())
        except Cancelled:
            self.post_message(Toast(f"the download of {request.model} is stopped. Opening it again resumes it."))
        except Exception as error:  # noqa: BLE001 - an internal error must not end the conversation
            self.post_message(Toast(describe_error(error), "error"))
        else:
            self.post_message(self.Done(request))
        finally:
            if not worker.is_cancelled:  # else the line is another download's, or hidden
                self.post_message(self.Changed(None))
