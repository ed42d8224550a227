"""What opening a model has to say, as messages for the screen."""

from __future__ import annotations

from pathlib import Path

from textual.app import App

from edgespec.tui.messages import Progressed, Toast
from edgespec.units import gib


class TuiReporter:
    """A Reporter whose words appear on the screen."""

    def __init__(self, app: App[None]) -> None:
        self._app = app

    def notice(self, text: str) -> None:
        self._app.post_message(Toast(text))

    def download(self, name: str, done: int, total: int) -> None:
        told = f"downloading {Path(name).name} {gib(done)} of {gib(total)}"
        self._app.post_message(Progressed(told, done / total if total else 0.0))

    def loading(self, name: str, fraction: float) -> None:
        self._app.post_message(Progressed(f"loading {Path(name).name}", fraction))
