"""F1: keys and commands."""

from __future__ import annotations

from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from edgespec.tui.keys import KEYS


class Help(ModalScreen[None]):
    """A scrolling list."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f1,q", "dismiss", "Back")]

    def __init__(self, commands: str) -> None:
        """`commands`: one line a command, with two spaces or more before its summary."""
        super().__init__()
        self._commands = commands

    def compose(self) -> ComposeResult:
        commands = Table.grid(padding=(0, 2))
        for line in self._commands.splitlines():
            name, _, summary = line.partition("  ")
            commands.add_row(Text(name, no_wrap=True), Text(summary.strip()))
        with VerticalScroll(classes="dialog") as dialog:
            dialog.border_subtitle = "Esc closes"
            yield Static(Text("Keys\n", "bold"))
            yield Static(KEYS, markup=False)
            yield Static(Text("Commands\n", "bold"))
            yield Static(commands)
