"""What is being done: a download, a load, a prefill, or an answer that has no text yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.text import Text
from textual import on, work
from textual.content import Content
from textual.message import Message
from textual.widgets import Static
from textual.worker import Worker, get_current_worker

from edgespec.core.metrics import Meter
from edgespec.core.protocols import PrefillProgress, Step
from edgespec.engine.events import Event, Finished
from edgespec.errors import Cancelled, NotReady
from edgespec.hub.hub import Hub
from edgespec.planner.plan import LoadConfig, fetch_all
from edgespec.registry.schema import load_registry
from edgespec.service.client import Stream
from edgespec.tui.messages import Toast
from edgespec.tui.panel import draw_bar
from edgespec.tui.turns import Answer
from edgespec.units import gib

# The work that the engine does for the chat: loading a model or generating an answer.


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

    def begin_answer(self, answer: Answer, requested_s: float, earlier: Mapping[str, Any]) -> None:
        self.answer, self.meter, self.finished, self.earlier = answer, Meter(0, requested_s), None, earlier

    def add(self, event: Event) -> None:
        """Count an event of the answer."""
        if isinstance(event, Step):
            self.meter.add(event)
        elif isinstance(event, PrefillProgress):
            self.meter.add_progress(event, perf_counter())
        elif isinstance(event, Finished):
            self.finished = event

    @property
    def is_loading(self) -> bool:
        """Whether a model or a draft is being opened."""
        return self.job is not None and self.answer is None

    def require_idle(self) -> None:
        """Check that no job runs; else raise NotReady."""
        if self.job is not None:
            raise NotReady("the engine is busy.", hint="Wait until it is done; Esc stops it.")


_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Progress(Static):
    """One line; hidden while there is nothing to show."""

    def __init__(self) -> None:
        super().__init__("", id="progress", markup=False)
        self._beats = count()
        self.display = False

    def show(self, text: str | None, fraction: float | None = None) -> None:
        """`fraction` is between 0 and 1; None without a bar. None as the text hides the line."""
        self.display = text is not None
        if text is not None:
            bar = "" if fraction is None else f"  {draw_bar(fraction, 20)} {fraction:.0%}"
            spinner = _SPINNER[next(self._beats) % len(_SPINNER)]
            self.update(Content.assemble((f"{spinner} {text}{bar}", "$text-accent"), "   Esc stops"))

    def show_answer(self, activity: Activity) -> None:
        """Say what an answer waits for, and for how long: to be called several times a second."""
        if activity.answer is not None:
            self.show(*describe_wait(activity, perf_counter() - activity.meter.started_s))


def describe_wait(activity: Activity, elapsed_s: float) -> tuple[str | None, float | None]:
    """Text and fraction of the line; no text while the answer itself grows."""
    answer, meter = activity.answer, activity.meter
    if answer is None or answer.text:
        return None, None
    if answer.reasoning:
        return f"reasoning · {meter.emitted_tokens:,} tokens · {elapsed_s:.0f} s", None
    progress = meter.progress
    if progress is not None and not meter.steps and progress.done < progress.total:
        return f"reading {progress.total:,} tokens · {elapsed_s:.0f} s", progress.done / progress.total
    return f"waiting for the first token · {elapsed_s:.0f} s", None


# A download beside the conversation: the model that is open goes on answering.


class Downloads(Static):
    """One line, hidden while nothing is downloaded. Posts `Done` once a model and what drafts for it are here."""

    @dataclass(eq=False)
    class Done(Message):
        """`request` can be opened without a download."""

        request: LoadConfig

    @dataclass(eq=False)
    class Progressed(Message):
        """`done` of `total` bytes of a file are here."""

        name: str
        done: int
        total: int

    def __init__(self) -> None:
        super().__init__("", id="download", markup=False)
        self._worker: Worker[Any] | None = None

    @property
    def is_active(self) -> bool:
        return self._worker is not None and not self._worker.is_finished

    def start(self, request: LoadConfig) -> None:
        """Download what `request` names; one at a time."""
        if self.is_active:
            self.post_message(Toast("a model is being downloaded already.", "Esc stops it.", "error"))
            return
        self._show(f"asking the hub about {request.model} …")
        self._worker = self._run(request)

    def cancel(self) -> bool:
        """Stop; whether there was a download. What has arrived is kept, and used by the next one."""
        if self._worker is None or self._worker.is_finished:
            return False
        self._worker.cancel()
        return True

    @work(thread=True, exit_on_error=False)
    def _run(self, request: LoadConfig) -> None:
        worker, reporter = get_current_worker(), _Reporter(self)

        def check() -> None:
            if worker.is_cancelled:
                raise Cancelled

        try:
            fetch_all(request, load_registry(), Hub.from_environment(), reporter, check)
        except Cancelled:
            self.post_message(Toast(f"the download of {request.model} is stopped.", "Opening it again resumes it."))
        except Exception as error:  # noqa: BLE001 - Toast separates expected errors from bugs
            self.post_message(Toast.from_error(error))
        else:
            self.post_message(self.Done(request))
        finally:
            self.post_message(self.Progressed("", 0, 0))

    @on(Progressed)
    def _show_progress(self, message: Progressed) -> None:
        message.stop()
        if not message.total:
            self._show("")
            return
        share = message.done / message.total
        name = Path(message.name).name
        self._show(f"{name} {gib(message.done)} of {gib(message.total)} ▕{draw_bar(share, 20)}▏ {share:.0%}")

    def _show(self, text: str) -> None:
        self.display = bool(text)
        self.update(Text(f"{text}   Esc stops" if text else "", no_wrap=True, overflow="ellipsis"))


class _Reporter:
    """A planner.plan.Reporter of a download, called on its thread."""

    def __init__(self, downloads: Downloads) -> None:
        self._downloads = downloads

    def notice(self, text: str) -> None:
        """The load tells it again."""

    def download(self, name: str, done: int, total: int) -> None:
        self._downloads.post_message(Downloads.Progressed(name, done, total))

    def loading(self, name: str, fraction: float) -> None:
        """A download loads nothing."""
