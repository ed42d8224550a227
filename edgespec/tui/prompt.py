"""The input field: several lines, with a history of what was sent, and completion of commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import events, on
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widget import Widget
from textual.widgets import TextArea

from edgespec.tui.popup import Completion, Popup
from edgespec.tui.sanitize import sanitize

# Shift+Enter and Alt+Enter of terminals with xterm's modifyOtherKeys, as Textual reads them.
_NEWLINES = ("shift+\r", "\r")


class Prompt(TextArea):
    """Enter sends; Ctrl+J, Alt+Enter and Shift+Enter start a new line; Up in the first line and Down in the last browse
    what was sent. While the popup lists completions, Up and Down select one, Tab takes it and Esc closes the list.

    Textual inserts characters where a key arrives, and runs a key's binding after the event has bubbled to the app. The
    prompt runs its bindings itself, so that keys take effect in the order in which they were pressed.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+j,alt+enter,shift+enter", "newline", "New line", show=False),
        Binding("pageup", "app.page(-1)", "Scroll up", show=False),
        Binding("pagedown", "app.page(1)", "Scroll down", show=False),
        Binding("ctrl+u", "clear", "Clear", show=False),
        Binding("ctrl+underscore", "undo", "Undo", show=False),
    ]

    class Submitted(Message):
        """The user sent `text`."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class QuitRequested(Message):
        """The user pressed Ctrl+D in an empty prompt."""

    def __init__(
        self,
        sent: Sequence[str],
        popup: Popup,
        complete: Callable[[str], Sequence[Completion]],
        take_back: Callable[[], str | None],
    ) -> None:
        """`sent` is browsed, the oldest first. `complete` lists in `popup` how a line that is typed can go on.
        `take_back` returns what waits to be sent, for Up in an empty prompt.
        """
        super().__init__(
            id="prompt", placeholder="Message, or / for commands", compact=True, highlight_cursor_line=False
        )
        self.border_subtitle = "Enter sends · Esc stops · F1 helps"
        self._sent = sent
        self._popup = popup
        self._complete = complete
        self._take_back = take_back
        self._at: int | None = None  # index into `sent`; None while it is not browsed
        self._draft = ""  # the text before browsing
        self._put = ""  # the text that was put here, not typed
        self._listed = ""  # the text whose completions were looked up last

    def action_newline(self) -> None:
        self.insert("\n")

    def action_clear(self) -> None:
        self._at = None
        self.clear()

    async def on_key(self, event: events.Key) -> None:
        self._list_completions()  # the message that the text has changed may still wait behind this key
        row = self.cursor_location[0]
        if self._popup.is_open and self._choose(event.key):
            pass
        elif event.key == "enter":
            self._submit()
        elif event.key in _NEWLINES:
            self.action_newline()
        elif event.key == "ctrl+d" and not self.text:
            self.post_message(self.QuitRequested())
        elif event.key == "up" and not self.text and (text := self._take_back()) is not None:
            self.put(text)
        elif event.key == "up" and row == 0 and self._sent:
            self._browse(-1)
        elif event.key == "down" and self._at is not None and row == self.document.line_count - 1:
            self._browse(1)
        elif not await self._run_binding(event.key):
            return
        event.prevent_default()
        event.stop()

    def put(self, text: str) -> None:
        """Replace the text and move the cursor to its end."""
        self._put = self.text = sanitize(text.replace("\r\n", "\n"))
        self._popup.close()
        self.move_cursor(self.document.end)

    def accept(self, completion: Completion) -> None:
        """Continue with `completion`, which may be completed in turn."""
        self.text = completion.line
        self.move_cursor(self.document.end)

    @on(TextArea.Changed)
    def _list_completions(self) -> None:
        if self.text == self._listed:
            return
        self._listed = self.text
        is_command = self.text.startswith("/") and "\n" not in self.text and self.text != self._put
        self._popup.show(self._complete(self.text) if is_command else ())

    async def _run_binding(self, key: str) -> bool:
        """Whether the prompt has a binding for the key, which is run then."""
        for binding in self._bindings.key_to_bindings.get(key, ()):
            if await self.app.run_action(binding.action, self):
                return True
        return False

    def _choose(self, key: str) -> bool:
        """Whether the list of completions takes the key."""
        selected = self._popup.selected
        if key in ("up", "down"):
            self._popup.move(1 if key == "down" else -1)
        elif key == "tab":
            self.accept(self._popup.best)
        elif key == "escape":
            self._popup.close()
        elif key == "enter" and selected is not None:
            self.accept(selected)
            if selected.is_whole:
                self._submit()
        elif key == "enter" and (only := self._popup.only) is not None and self._is_part_of_name(only):
            self.accept(only)
        else:
            return False
        return True

    def _is_part_of_name(self, completion: Completion) -> bool:
        """Whether the text is the beginning of the command's name, so that it cannot be sent."""
        name = completion.line.rstrip()
        return " " not in self.text and name != self.text and name.startswith(self.text)

    def _submit(self) -> None:
        text = self.text
        if not text.strip():
            return
        self._at = None
        self.put("")
        assert isinstance(self.parent, Widget)
        self.parent.post_message(self.Submitted(text))  # the way that keys bubble, so that it arrives between them

    def _browse(self, by: int) -> None:
        if self._at is None:
            self._draft, self._at = self.text, len(self._sent)
        self._at = max(0, self._at + by)
        if self._at >= len(self._sent):
            self._at = None
            self.put(self._draft)
        else:
            self.put(self._sent[self._at])
