"""How far a download, a load or the reading of a prompt is."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import Static

from edgespec.tui.live_stats import bar


class Progress(Static):
    """One line with a bar, which is not there while nothing is under way."""

    def __init__(self) -> None:
        super().__init__("", id="progress", markup=False)

    def show(self, told: str | None, fraction: float = 0.0) -> None:
        if told is None and not self.display:
            return
        self.display = told is not None
        self.update(Text(f"{told} ▕{bar(fraction, 20)}▏ {fraction:.0%}   Esc stops" if told is not None else ""))
