"""The key bindings of the chat, and their list for the help screen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.keys import Keys
from textual.screen import ModalScreen
from textual.widgets import Static

# Terminals that send Escape and Return for Alt+Enter: Textual drops the Escape, and the message would be sent.
ALT_ENTER = "\x1b\r"
assert isinstance(ANSI_SEQUENCES_KEYS, dict)
ANSI_SEQUENCES_KEYS[ALT_ENTER] = (Keys.ControlJ,)

BINDINGS: list[BindingType] = [
    Binding("f1", "help", "Help"),
    Binding("f2", "details", "Details"),
    Binding("f5", "reopen", "Reopen", show=False),
    Binding("escape", "stop", "Stop", show=False),
    Binding("ctrl+c", "stop", "Stop", show=False, priority=True),
    Binding("ctrl+t", "fold", "Reasoning"),
    Binding("ctrl+o", "token_colors", "Colors"),
    Binding("ctrl+n", "command('new')", "New"),
    Binding("ctrl+r", "command('history')", "History"),
    Binding("ctrl+g", "command('model')", "Models"),
    Binding("ctrl+b,alt+right", "command('branch')", "Branch", show=False),
    Binding("alt+left", "command('branch back')", "Branch before", show=False),
    Binding("alt+up", "command('branch up')", "Branches above", show=False),
    Binding("alt+down", "command('branch down')", "Branches below", show=False),
    Binding("ctrl+l", "clear_screen", "Clear", show=False),
    Binding("ctrl+z", "suspend_process", "Suspend", show=False, priority=True),
    Binding("ctrl+q", "leave", "Quit", priority=True),
]

KEYS = (
    ("Enter", "send"),
    ("Ctrl+J, Alt+Enter, Shift+Enter", "new line"),
    ("Up, Down", "earlier messages; what is queued"),
    ("Tab", "complete a command"),
    ("Esc, Ctrl+C", "stop, keep the text"),
    ("PageUp, PageDown", "scroll"),
    ("Ctrl+N", "new conversation"),
    ("Ctrl+R", "list, search conversations"),
    ("Ctrl+B, Alt+Right, Alt+Left", "next branch, the one before"),
    ("Alt+Up, Alt+Down", "branches above, below"),
    ("Ctrl+G", "list models"),
    ("F1", "this help"),
    ("F2", "steps, costs, acceptance"),
    ("F5", "open the model again"),
    ("Ctrl+T", "fold or unfold reasoning"),
    ("Ctrl+O", "color tokens by drafter"),
    ("Ctrl+P", "all commands"),
    ("Ctrl+L", "clear the screen"),
    ("Ctrl+U, Ctrl+Underscore", "clear the prompt, undo in it"),
    ("Ctrl+Z", "suspend; fg resumes"),
    ("Ctrl+D", "quit, if the prompt is empty"),
    ("Ctrl+Q", "quit"),
)

GLOSSARY = (
    ("token", "a word or a part of one; models read and write tokens"),
    ("plain decoding", "the model computes once for every token that it writes"),
    ("drafting", "something fast proposes the next tokens: a small model, the text so far, or the model itself"),
    ("lookups", "what followed the same words before, in this chat or in earlier ones, is proposed again"),
    ("verifying", "the model checks all proposed tokens at once, for about the price of one"),
    ("accepted", "the proposed tokens that the model keeps; the text is what it would write without them"),
    ("1.31x", "the speed of this answer over the speed of plain decoding, as measured meanwhile"),
    ("tokens per step", "also called tau: how many tokens one computation of the model yields; plain decoding has 1"),
    ("first token", "the time from sending a message to the first token of its answer"),
    ("context", "the tokens that the model can see: the conversation and the answer"),
)


class Help(ModalScreen[None]):
    """A scrolling list of keys, words and commands."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f1,q", "dismiss", "Back")]

    def __init__(self, commands: Iterable[tuple[str, str]]) -> None:
        """`commands`: the usage and the summary of each."""
        super().__init__()
        self._commands = commands

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog") as dialog:
            dialog.border_title = "Help"
            dialog.border_subtitle = "Esc closes"
            yield _make_section("Keys", KEYS)
            yield _make_section("Words", GLOSSARY)
            yield _make_section("Commands", self._commands)


def _make_section(title: str, rows: Iterable[tuple[str, str]]) -> Static:
    table = Table.grid(padding=(0, 2))
    for name, summary in rows:
        table.add_row(Text(name, "bold", no_wrap=True), Text(summary))
    section = Static(table, classes="section")
    section.border_title = title
    return section
