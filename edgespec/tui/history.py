"""The stored conversations: listed, searched, resumed, removed."""

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

_KEYS = "Enter resumes · type to search · Ctrl+X removes · Esc goes back"


class History(FilterList[int]):
    """Ends with the id of the conversation to resume, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+x", "remove", "Remove", priority=True),
    ]

    def __init__(self, store: Store, present: int | None, text: str = "") -> None:
        """`present` is the conversation on the screen, which stays; `text` is searched for at once."""
        super().__init__()
        self._store = store
        self._present = present
        self._text = text
        self._doubted: int | None = None  # removed when the key is pressed once more

    def compose(self) -> ComposeResult:
        with Vertical(classes="window"):
            yield Input(self._text, placeholder="Search all conversations", id="wanted")
            table: DataTable[str | Text] = DataTable(cursor_type="row", zebra_stripes=True)
            table.add_column("changed", width=16)
            table.add_column("model", width=18)
            table.add_column("conversation")
            yield table
            yield Static(_KEYS, id="told", markup=False)

    def on_mount(self) -> None:
        self.fill()

    def action_remove(self) -> None:
        key = self.selected()
        if key is None:
            return
        id = int(key)
        if id == self._present:
            self.say("This conversation is on the screen; /new begins another, then it can be removed.")
        elif id != self._doubted:
            self._doubted = id
            self.say("Ctrl+X once more removes it for good.")
        else:
            try:
                self._store.remove(self._store.resume(id))
            except EdgespecError as error:
                self.say(f"{error.message} {error.hint}")
                return
            self.fill()
            self.say("Removed.")

    def choose(self) -> None:
        key = self.selected()
        if key is not None:
            self.dismiss(int(key))

    def fill(self) -> None:
        self._doubted = None
        wanted = self.query_one(Input).value
        rows: list[tuple[Conversation, str]]
        try:
            if wanted.strip():
                rows = [(found.conversation, found.snippet) for found in self._store.search(wanted)]
            else:
                rows = [(conversation, "") for conversation in self._store.recent()]
        except EdgespecError as error:
            self.say(f"{error.message} {error.hint}")
            return
        table = self.query_one(DataTable)
        table.clear()
        for conversation, snippet in rows:
            when = datetime.fromtimestamp(conversation.changed).strftime("%Y-%m-%d %H:%M")
            told = Text(conversation.title)
            if snippet and snippet != conversation.title:
                told.append(f"  {snippet}", "dim")
            table.add_row(
                when, Text(conversation.model, overflow="ellipsis", no_wrap=True), told, key=str(conversation.id)
            )
        self.say(_KEYS if rows else "Nothing found." if wanted.strip() else "No conversation has been kept yet.")
