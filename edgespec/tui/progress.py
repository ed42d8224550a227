"""The progress of a download, a load or a prefill."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import Static

from edgespec.tui.bars import draw_bar


class Progress(Static):
    """One line with a bar; hidden while there is nothing to show."""

    def __init__(self) -> None:
        super().__init__("", id="progress", markup=False)

    def show(self, text: str | None, fraction: float = 0.0) -> None:
        """`fraction` is between 0 and 1. None as the text hides the line."""
        if text is None and not self.display:
            return
        self.display = text is not None
        self.update(Text(f"{text} ▕{draw_bar(fraction, 20)}▏ {fraction:.0%}   Esc stops" if text is not None else ""))
