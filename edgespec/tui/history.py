"""The stored conversations: list, search, resume, delete."""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import DataTable, Input, Static

from edgespec.conversations import Conversation, Store
from edgespec.errors import EdgespecError
from edgespec.tui.filter_list import FilterList
from edgespec.tui.messages import Toast

_KEYS = "Enter resumes · type to search · Ctrl+X deletes · Esc closes"


class History(FilterList[int]):
    """Dismissed with the id of the conversation to resume, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+x", "delete", "Delete", priority=True),
    ]

    def __init__(self, store: Store, current_id: int | None, text: str = "") -> None:
        """`current_id`: the conversation on the screen, which cannot be deleted. `text`: the first search."""
        super().__init__()
        self._store = store
        self._current_id = current_id
        self._text = text
        self._confirm_id: int | None = None  # deleted if the key is pressed again

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Input(self._text, placeholder="Search all conversations", id="filter")
            table: DataTable[str | Text] = DataTable(cursor_type="row", zebra_stripes=True)
            table.add_column("changed", width=16)
            table.add_column("model", width=18)
            table.add_column("conversation")
            yield table
            yield Static(_KEYS, id="status", markup=False)

    def on_mount(self) -> None:
        self.fill()

    def action_delete(self) -> None:
        key = self.selected_key()
        if key is None:
            return
        id = int(key)
        if id == self._current_id:
            self.say("The conversation on the screen cannot be deleted; /new starts another one.")
        elif id != self._confirm_id:
            self._confirm_id = id
            self.say("Press Ctrl+X again to delete it for good.")
        else:
            try:
                self._store.remove(self._store.resume(id))
            except EdgespecError as error:
                self.say(str(Toast.from_error(error)))
                return
            self.fill()
            self.say("Deleted.")

    def choose(self) -> None:
        key = self.selected_key()
        if key is not None:
            self.dismiss(int(key))

    def fill(self) -> None:
        self._confirm_id = None
        query = self.query_one(Input).value
        rows: list[tuple[Conversation, str]]
        try:
            if query.strip():
                rows = [(found.conversation, found.snippet) for found in self._store.search(query)]
            else:
                rows = [(conversation, "") for conversation in self._store.recent()]
        except EdgespecError as error:
            self.say(str(Toast.from_error(error)))
            return
        table = self.query_one(DataTable)
        table.clear()
        for conversation, snippet in rows:
            changed = datetime.fromtimestamp(conversation.changed).strftime("%Y-%m-%d %H:%M")
            title = Text(conversation.title)
            if snippet and snippet != conversation.title:
                title.append(f"  {snippet}", "dim")
            model = Text(conversation.model, overflow="ellipsis", no_wrap=True)
            table.add_row(changed, model, title, key=str(conversation.id))
        self.say(_KEYS if rows else "Nothing found." if query.strip() else "No conversation is stored yet.")
