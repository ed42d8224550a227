"""The key bindings of the chat, and their list for the help screen."""

from __future__ import annotations

from textual.binding import Binding, BindingType

BINDINGS: list[BindingType] = [
    Binding("f1", "help", "Help"),
    Binding("f2", "details", "Details"),
    Binding("escape", "stop", "Stop", show=False),
    Binding("ctrl+c", "stop", "Stop", show=False, priority=True),
    Binding("ctrl+t", "fold", "Reasoning"),
    Binding("ctrl+o", "token_colors", "Colors"),
    Binding("ctrl+n", "command('new')", "New"),
    Binding("ctrl+r", "command('history')", "History"),
    Binding("ctrl+g", "command('model')", "Models"),
    Binding("ctrl+b", "command('branch')", "Branch", show=False),
    Binding("ctrl+l", "clear_screen", "Clear", show=False),
    Binding("ctrl+q", "leave", "Quit", priority=True),
]

KEYS = """\
Enter        send                     F1      this help
Ctrl+J       new line (or Alt+Enter)  F2      steps, costs, acceptance
Up, Down     earlier messages         Ctrl+T  fold or unfold reasoning
Esc, Ctrl+C  stop, keep the text      Ctrl+O  color tokens by drafter
Ctrl+N       new conversation         Ctrl+R  list, search conversations
Ctrl+B       next branch              Ctrl+G  list models
Ctrl+L       clear the screen         Ctrl+P  all commands
Ctrl+D       quit, if the prompt      Ctrl+Q  quit
             is empty
"""
