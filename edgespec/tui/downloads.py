"""A download beside the conversation: the model that is open goes on answering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.text import Text
from textual import on, work
from textual.message import Message
from textual.widgets import Static
from textual.worker import Worker, get_current_worker

from edgespec.errors import Cancelled
from edgespec.hub.hub import Hub
from edgespec.planner.plan import LoadConfig, fetch_all
from edgespec.registry.schema import load_registry
from edgespec.tui.bars import draw_bar
from edgespec.tui.messages import Toast
from edgespec.units import gib


class Downloads(Static):
    """One line, hidden while nothing is downloaded. Posts `Done` once a model and what drafts for it are here."""

    class Done(Message):
        """`request` can be opened without a download."""

        def __init__(self, request: LoadConfig) -> None:
            super().__init__()
            self.request = request

    class Progressed(Message):
        """`done` of `total` bytes of a file are here."""

        def __init__(self, name: str, done: int, total: int) -> None:
            super().__init__()
            self.name = name
            self.done = done
            self.total = total

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
