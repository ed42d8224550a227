"""The input field: several lines, with a history of what was sent, and completion of commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual import events, on
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widget import Widget
from textual.widgets import OptionList, TextArea
from textual.widgets.option_list import Option

MAX_COMPLETIONS = 50


@dataclass(frozen=True, slots=True)
class Completion:
    """One way to go on.

    line      what the prompt has then
    shown     the part of it that is listed
    summary   what it does
    is_whole  it can be sent as it is
    """

    line: str
    shown: str
    summary: str = ""
    is_whole: bool = True


class Popup(OptionList):
    """Hidden while there is nothing to complete. Nothing is selected until the user moves down or up."""

    can_focus = False

    def __init__(self) -> None:
        super().__init__(id="popup", compact=True, markup=False)
        self.completions: Sequence[Completion] = ()
        self.display = False

    @property
    def selected(self) -> Completion | None:
        return None if self.highlighted is None else self.completions[self.highlighted]

    def show(self, completions: Sequence[Completion]) -> None:
        """List these; none hides the list."""
        self.completions = completions[:MAX_COMPLETIONS]
        self.display = bool(completions)
        self.clear_options()
        width = max((len(each.shown) for each in self.completions), default=0)
        for each in self.completions:
            label = Text(f"{each.shown:{width}}", "bold", no_wrap=True, overflow="ellipsis")
            self.add_option(Option(label.append(f"  {each.summary}", "not bold dim") if each.summary else label))

    def move(self, by: int) -> None:
        """Select the next line, or the one before."""
        count = len(self.completions)
        self.highlighted = (0 if by > 0 else count - 1) if self.highlighted is None else (self.highlighted + by) % count


# C0 becomes the control pictures of Unicode; C1 has none and becomes the replacement character.
_PICTURES = {code: 0x2400 + code for code in range(0x20)} | dict.fromkeys(range(128, 160), 65533)
_BIDI = {code: f"‹U+{code:X}›" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}  # noqa: RUF001
_TABLE: dict[int, int | str] = {**_PICTURES, **_BIDI, 0x09: 0x09, 0x0A: 0x0A, 0x0D: 0x20, 0x7F: 0x2421}


def sanitize(text: str) -> str:
    """Replace every control character but tab and newline by one visible character, a carriage return by a space, and
    every control of the direction of writing by its number. So no text can control the terminal or reorder itself.
    """
    return text.translate(_TABLE)


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

    @dataclass(eq=False)
    class Submitted(Message):
        """The user sent `text`."""

        text: str

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
        self._listed = ""  # the text whose completions were looked up last, or which was put here, not typed

    def action_newline(self) -> None:
        self.insert("\n")

    def action_clear(self) -> None:
        self._at = None
        self.clear()

    async def on_key(self, event: events.Key) -> None:
        self._list_completions()  # the message that the text has changed may still wait behind this key
        row = self.cursor_location[0]
        if self._popup.completions and self._choose(event.key):
            pass
        elif event.key == "enter":
            self.submit()
        elif event.key in _NEWLINES:
            self.action_newline()
        elif event.key == "ctrl+d" and not self.text:
            await self.app.run_action("leave")
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

    def on_paste(self, event: events.Paste) -> None:
        event.stop()  # TextArea inserts the text and lets the event bubble to the app, which would insert it again

    def put(self, text: str) -> None:
        """Replace the text and move the cursor to its end."""
        self._listed = self.text = sanitize(text.replace("\r\n", "\n"))
        self._popup.show(())
        self.move_cursor(self.document.end)

    def put_back(self, text: str) -> None:
        """Put `text` before what has been typed meanwhile."""
        self.put(f"{text}\n\n{self.text}" if self.text.strip() else text)

    def accept(self, completion: Completion) -> None:
        """Continue with `completion`, which may be completed in turn."""
        self.text = completion.line
        self.move_cursor(self.document.end)

    @on(TextArea.Changed)
    def _list_completions(self) -> None:
        if self.text == self._listed:
            return
        self._listed = self.text
        is_command = self.text.startswith("/") and "\n" not in self.text
        self._popup.show(self._complete(self.text) if is_command else ())

    async def _run_binding(self, key: str) -> bool:
        """Whether the prompt has a binding for the key, which is run then."""
        for binding in self._bindings.key_to_bindings.get(key, ()):
            if await self.app.run_action(binding.action, self):
                return True
        return False

    def _choose(self, key: str) -> bool:
        """Whether the list of completions takes the key."""
        selected, completions = self._popup.selected, self._popup.completions
        if key in ("up", "down"):
            self._popup.move(1 if key == "down" else -1)
        elif key == "tab":
            self.accept(selected or completions[0])
        elif key == "escape":
            self._popup.show(())
        elif key == "enter" and selected is not None:
            self.accept(selected)
            if selected.is_whole:
                self.submit()
        else:
            return False
        return True

    def submit(self) -> None:
        """Send the text, unless it is blank."""
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
