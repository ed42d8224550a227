"""The widgets of the chat, and what only changes how they look."""

from __future__ import annotations

from pathlib import Path

from textual.app import App, ComposeResult
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.widgets import Footer

from edgespec.tui.log import Log
from edgespec.tui.panel import Panel, Strip
from edgespec.tui.progress import Progress
from edgespec.tui.prompt import Prompt
from edgespec.tui.turns import Answer, Notice

_NARROW = 100  # columns below which the instruments are one line


class Window(App[None]):
    """The conversation, the prompt and the instruments."""

    CSS_PATH = Path(__file__).with_name("style.tcss")
    TITLE = "edgespec"

    def __init__(self) -> None:
        super().__init__()
        self._folded = True
        self._origins = False

    def compose(self) -> ComposeResult:
        with Horizontal(id="body"):
            with Vertical(id="left"):
                yield Log()
                yield Progress()
                yield Prompt()
            yield Panel()
        yield Strip()
        yield Footer(compact=True, show_command_palette=False)

    async def say(self, text: str, kind: str = "note") -> None:
        """A sentence in the conversation."""
        await self.query_one(Log).add(Notice(text[:1].upper() + text[1:], kind))

    def action_fold(self) -> None:
        self._folded = not self._folded
        self.apply_width()

    def action_origins(self) -> None:
        self._origins = not self._origins
        self.apply_width()

    def apply_width(self) -> None:
        """Reasoning folded or not, and origins shown or not, as the user last wished."""
        for answer in self.query(Answer):
            answer.fold(self._folded)
            answer.show_origins(self._origins)

    def on_resize(self, event: Resize) -> None:
        self.screen_stack[0].set_class(event.size.width < _NARROW, "narrow")
