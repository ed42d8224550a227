"""A list with a filter above it and a status line below it."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from rich.text import Text
from textual import on
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import DataTable, Input, Static

T = TypeVar("T")


class FilterList(ModalScreen[T | None]):
    """Dismissed with the choice, or None. A subclass composes an Input, a DataTable and a Static of the id `status`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "Back"),
        Binding("down", "focus_table", "List", show=False),
    ]

    def fill(self) -> None:
        """Show the rows that match the filter; a row's key identifies what it stands for."""
        raise NotImplementedError

    def choose(self) -> None:
        """Dismiss the screen with the selected row, if there is one."""
        raise NotImplementedError

    def selected_key(self) -> str | None:
        """The key of the row under the cursor; None where the table is empty."""
        table = self.query_one(DataTable)
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value if table.row_count else None

    def say(self, text: str) -> None:
        """Show `text` in the status line."""
        self.query_one("#status", Static).update(Text(text))

    @on(Input.Changed)
    def _filter(self) -> None:
        self.fill()

    @on(Input.Submitted)
    @on(DataTable.RowSelected)
    def _submit(self) -> None:
        self.choose()

    def action_focus_table(self) -> None:
        self.query_one(DataTable).focus()

    def action_close(self) -> None:
        self.dismiss(None)
