"""Progress of a load as messages to the app."""

from __future__ import annotations

from pathlib import Path

from textual.app import App

from edgespec.tui.messages import ProgressChanged
from edgespec.units import gib


class TuiReporter:
    """A planner.plan.Reporter that shows progress on the screen and keeps notices; safe to call from any thread."""

    def __init__(self, app: App[None]) -> None:
        self.notices: list[str] = []
        self._app = app

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def download(self, name: str, done: int, total: int) -> None:
        text = f"downloading {Path(name).name} {gib(done)} of {gib(total)}"
        self._app.post_message(ProgressChanged(text, done / total if total else 0.0))

    def loading(self, name: str, fraction: float) -> None:
        self._app.post_message(ProgressChanged(f"loading {Path(name).name}", fraction))
