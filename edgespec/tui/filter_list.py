"""A list to choose from, with a line above it that narrows it and a line below it that speaks."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from rich.text import Text
from textual import on
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import DataTable, Input, Static

T = TypeVar("T")


class FilterList(ModalScreen[T | None]):
    """Composed with an Input, a DataTable and a Static of id `told`. Ends with what was chosen, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Back"),
        Binding("down", "into_table", "List", show=False),
    ]

    def fill(self) -> None:
        """Show the rows that the line above allows; their keys say what they stand for."""
        raise NotImplementedError

    def choose(self) -> None:
        """End with the row under the cursor, if there is one."""
        raise NotImplementedError

    def selected(self) -> str | None:
        """The key of the row under the cursor."""
        table = self.query_one(DataTable)
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value if table.row_count else None

    def say(self, text: str) -> None:
        self.query_one("#told", Static).update(Text(text))

    @on(Input.Changed)
    def _narrow(self) -> None:
        self.fill()

    @on(Input.Submitted)
    @on(DataTable.RowSelected)
    def _take(self) -> None:
        self.choose()

    def action_into_table(self) -> None:
        self.query_one(DataTable).focus()

    def action_leave(self) -> None:
        self.dismiss(None)
