"""F1: keys, commands, and the words of the screens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from edgespec.tui.keys import KEYS

GLOSSARY = (
    ("token", "a word or a part of one; models read and write tokens"),
    ("plain decoding", "the model computes once for every token that it writes"),
    ("drafting", "something fast proposes the next tokens: a small model, the text so far, or the model itself"),
    ("verifying", "the model checks all proposed tokens at once, for about the price of one"),
    ("accepted", "the proposed tokens that the model keeps; the text is what it would write without them"),
    ("x plain", "the speed of this answer over the speed of plain decoding, as measured meanwhile"),
    ("tokens per step", "also called tau: how many tokens one computation of the model yields; plain decoding has 1"),
    ("first token", "the time from sending a message to the first token of its answer"),
    ("context", "the tokens that the model can see: the conversation and the answer"),
)


class Help(ModalScreen[None]):
    """A scrolling list."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f1,q", "dismiss", "Back")]

    def __init__(self, commands: str) -> None:
        """`commands`: one line a command, with two spaces or more before its summary."""
        super().__init__()
        self._commands = commands

    def compose(self) -> ComposeResult:
        commands = (line.partition("  ") for line in self._commands.splitlines())
        with VerticalScroll(classes="dialog") as dialog:
            dialog.border_title = "Help"
            dialog.border_subtitle = "Esc closes"
            yield _make_section("Keys", KEYS)
            yield _make_section("Words", GLOSSARY)
            yield _make_section("Commands", ((name, summary.strip()) for name, _, summary in commands))


def _make_section(title: str, rows: Iterable[tuple[str, str]]) -> Static:
    table = Table.grid(padding=(0, 2))
    for name, summary in rows:
        table.add_row(Text(name, "bold", no_wrap=True), Text(summary))
    section = Static(table, classes="section")
    section.border_title = title
    return section
