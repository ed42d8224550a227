"""F1: keys and commands."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from edgespec.tui.keys import KEYS


class Help(ModalScreen[None]):
    """Esc goes back."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f1,q", "dismiss", "Back")]

    def __init__(self, commands: str) -> None:
        super().__init__()
        self._commands = commands

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="window"):
            yield Static(f"Keys\n\n{KEYS}\nCommands\n\n{self._commands}", markup=False)

    async def action_dismiss(self, result: None = None) -> None:
        self.dismiss(None)
