"""The keys of the chat, and what F1 says of them."""

from __future__ import annotations

from textual.binding import Binding, BindingType

BINDINGS: list[BindingType] = [
    Binding("f1", "help", "Help"),
    Binding("f2", "details", "Details"),
    Binding("escape", "stop", "Stop", show=False),
    Binding("ctrl+c", "stop", "Stop", show=False, priority=True),
    Binding("ctrl+t", "fold", "Reasoning"),
    Binding("ctrl+o", "origins", "Origins"),
    Binding("ctrl+n", "command('new')", "New"),
    Binding("ctrl+r", "command('history')", "History"),
    Binding("ctrl+g", "command('model')", "Models"),
    Binding("ctrl+b", "command('branch')", "Branch", show=False),
    Binding("ctrl+l", "clear_screen", "Clear", show=False),
    Binding("ctrl+q", "leave", "Quit", priority=True),
]

KEYS = """\
Enter        send                     F1      this help
Ctrl+J       new line (or Alt+Enter)  F2      rounds, costs, acceptance
Up, Down     what was sent before     Ctrl+T  fold, unfold reasoning
Esc, Ctrl+C  stop, keep the text      Ctrl+O  colour text by origin
Ctrl+N       new chat                 Ctrl+R  earlier chats, search
Ctrl+B       next branch              Ctrl+G  models
Ctrl+L       clear the screen         Ctrl+P  all commands
Ctrl+D       quit, if nothing is      Ctrl+Q  quit
             written
"""
