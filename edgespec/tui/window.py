"""The layout of the chat, and its view options."""

from __future__ import annotations

from pathlib import Path

from textual.app import App, ComposeResult
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.notifications import SeverityLevel
from textual.widgets import Footer

from edgespec.errors import EdgespecError
from edgespec.tui.messages import Toast
from edgespec.tui.panel import Panel, StatusLine
from edgespec.tui.progress import Progress
from edgespec.tui.prompt import Prompt
from edgespec.tui.sanitize import sanitize
from edgespec.tui.transcript import Transcript
from edgespec.tui.turns import Answer, Notice

_MIN_PANEL_COLUMNS = 100  # narrower screens show the status line instead of the panel
_MIN_NOTICE_S = 4.0
_READ_PER_S = 15  # characters


class Window(App[None]):
    """The conversation, the prompt and the instruments."""

    CSS_PATH = Path(__file__).with_name("style.tcss")
    TITLE = "edgespec"

    def __init__(self) -> None:
        super().__init__()
        self._is_reasoning_folded = True
        self._shows_token_colors = False

    def compose(self) -> ComposeResult:
        with Horizontal(id="body"):
            with Vertical(id="conversation"):
                yield Transcript()
                yield Progress()
                yield Prompt()
            yield Panel()
        yield StatusLine()
        yield Footer(compact=True, show_command_palette=False)

    async def say(self, text: str, kind: str = "note") -> None:
        """Show a notice in a corner of the screen for as long as it takes to read; `kind` is "note" or "error"."""
        severity: SeverityLevel = "error" if kind == "error" else "information"
        seconds = max(_MIN_NOTICE_S, len(text) / _READ_PER_S)
        self.notify(sanitize(_capitalize(text)), severity=severity, timeout=seconds, markup=False)

    async def say_error(self, error: EdgespecError) -> None:
        await self.say(str(Toast.from_error(error)), "error")

    async def keep(self, text: str, kind: str = "note") -> None:
        """Add a notice that stays to the conversation, such as what ended an answer."""
        await self.query_one(Transcript).add(Notice(_capitalize(text), kind))

    def action_fold(self) -> None:
        self._is_reasoning_folded = not self._is_reasoning_folded
        self.apply_view_options()

    def action_token_colors(self) -> None:
        self._shows_token_colors = not self._shows_token_colors
        self.apply_view_options()

    def apply_view_options(self) -> None:
        """Fold the reasoning and color the tokens of every answer as the user has chosen."""
        for answer in self.query(Answer):
            answer.fold(self._is_reasoning_folded)
            answer.show_token_colors(self._shows_token_colors)

    def on_resize(self, event: Resize) -> None:
        self.screen_stack[0].set_class(event.size.width < _MIN_PANEL_COLUMNS, "narrow")


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]
