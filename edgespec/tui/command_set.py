"""What the chat asks of the slash commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from edgespec.tui.popup import Completion

if TYPE_CHECKING:
    from edgespec.tui.app import ChatApp


class CommandSet(Protocol):
    """The slash commands."""

    help: str  # one line a command

    async def run(self, app: ChatApp, line: str) -> None:
        """Run `line`, given without its slash. Raises EdgespecError."""

    def complete(self, line: str, themes: Iterable[str]) -> Sequence[Completion]:
        """How a line that is being typed, with its slash, can go on."""

    def without_arguments(self) -> Iterable[tuple[str, str]]:
        """(name, summary) of each command that needs no argument."""
