"""The key bindings of the chat, and their list for the help screen."""

from __future__ import annotations

from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual.binding import Binding, BindingType
from textual.keys import Keys

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
