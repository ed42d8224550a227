"""Where the user writes: several lines, with a history."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import TextArea

from edgespec.tui.sanitize import sanitize


class Prompt(TextArea):
    """Enter sends; Ctrl+J or Alt+Enter begins a new line; Up and Down at its edges go through what was sent."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+j,alt+enter", "newline", "New line", show=False)]

    class Sent(Message):
        """The user sent `text`."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Left(Message):
        """The user pressed Ctrl+D with nothing written."""

    def __init__(self) -> None:
        super().__init__(
            id="prompt", placeholder="Message, or / for commands", compact=True, highlight_cursor_line=False
        )
        self.border_subtitle = "Enter sends · Esc stops"
        self.sent: list[str] = []
        self._at: int | None = None  # in the history
        self._draft = ""

    def action_newline(self) -> None:
        self.insert("\n")

    def on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.prevent_default()
            event.stop()
            self._send()
        elif event.key == "ctrl+d" and not self.text:
            event.prevent_default()
            event.stop()
            self.post_message(self.Left())
        elif event.key == "up" and self.cursor_location[0] == 0 and self.sent:
            event.prevent_default()
            event.stop()
            self._browse(-1)
        elif event.key == "down" and self._at is not None and self.cursor_location[0] == self.document.line_count - 1:
            event.prevent_default()
            event.stop()
            self._browse(1)

    def put(self, text: str) -> None:
        """Replace what is written."""
        self.text = sanitize(text.replace("\r\n", "\n"))
        self.move_cursor(self.document.end)

    def _send(self) -> None:
        text = self.text
        if not text.strip():
            return
        if not self.sent or self.sent[-1] != text:
            self.sent.append(text)
        self._at = None
        self.text = ""
        self.post_message(self.Sent(text))

    def _browse(self, by: int) -> None:
        if self._at is None:
            self._draft, self._at = self.text, len(self.sent)
        self._at = max(0, self._at + by)
        if self._at >= len(self.sent):
            self._at = None
            self.put(self._draft)
        else:
            self.put(self.sent[self._at])
