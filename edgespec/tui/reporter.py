"""Progress of a load as messages to the app."""

from __future__ import annotations

from pathlib import Path

from textual.app import App

from edgespec.tui.messages import ProgressChanged, Toast
from edgespec.units import gib


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
