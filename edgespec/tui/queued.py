"""The messages and commands that wait until the running job has ended."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.widgets import Static

from edgespec.tui.sanitize import sanitize

_MAX_LINES = 4


class Queued(Static):
    """A line for each, the next one first; hidden while none waits."""

    def __init__(self) -> None:
        super().__init__("", id="queued", markup=False)
        self.display = False

    def show(self, texts: Sequence[str]) -> None:
        self.display = bool(texts)
        shown = [f"queued: {' '.join(sanitize(text).split())}" for text in texts[:_MAX_LINES]]
        if len(texts) > _MAX_LINES:
            shown[-1] = f"queued: {len(texts) - _MAX_LINES + 1} more"
        text = Text("\n".join(shown), no_wrap=True, overflow="ellipsis")
        self.update(text.append("\nUp takes the last one back", "dim") if texts else text)
