"""The input field: several lines, with a history of what was sent."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import TextArea

from edgespec.tui.sanitize import sanitize


class Prompt(TextArea):
    """Enter sends; Ctrl+J or Alt+Enter starts a new line; Up in the first line and Down in the last browse `sent`."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+j,alt+enter", "newline", "New line", show=False)]

    class Submitted(Message):
        """The user sent `text`."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class QuitRequested(Message):
        """The user pressed Ctrl+D in an empty prompt."""

    def __init__(self) -> None:
        super().__init__(
            id="prompt", placeholder="Message, or / for commands", compact=True, highlight_cursor_line=False
        )
        self.border_subtitle = "Enter sends · Esc stops"
        self.sent: list[str] = []  # the oldest first
        self._at: int | None = None  # index into `sent`; None while it is not browsed
        self._draft = ""  # the text before browsing

    def action_newline(self) -> None:
        self.insert("\n")

    def on_key(self, event: events.Key) -> None:
        row = self.cursor_location[0]
        if event.key == "enter":
            self._submit()
        elif event.key == "ctrl+d" and not self.text:
            self.post_message(self.QuitRequested())
        elif event.key == "up" and row == 0 and self.sent:
            self._browse(-1)
        elif event.key == "down" and self._at is not None and row == self.document.line_count - 1:
            self._browse(1)
        else:
            return
        event.prevent_default()
        event.stop()

    def put(self, text: str) -> None:
        """Replace the text and move the cursor to its end."""
        self.text = sanitize(text.replace("\r\n", "\n"))
        self.move_cursor(self.document.end)

    def _submit(self) -> None:
        text = self.text
        if not text.strip():
            return
        if not self.sent or self.sent[-1] != text:
            self.sent.append(text)
        self._at = None
        self.text = ""
        self.post_message(self.Submitted(text))

    def _browse(self, by: int) -> None:
        if self._at is None:
            self._draft, self._at = self.text, len(self.sent)
        self._at = max(0, self._at + by)
        if self._at >= len(self.sent):
            self._at = None
            self.put(self._draft)
        else:
            self.put(self.sent[self._at])
