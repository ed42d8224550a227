"""What the input can be completed to, listed above the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text
from textual.widgets import OptionList
from textual.widgets.option_list import Option

MAX_COMPLETIONS = 50


@dataclass(frozen=True, slots=True)
class Completion:
    """One way to go on.

    line      what the prompt has then
    shown     the part of it that is listed
    summary   what it does
    is_whole  it can be sent as it is
    """

    line: str
    shown: str
    summary: str = ""
    is_whole: bool = True


class Popup(OptionList):
    """Hidden while there is nothing to complete. Nothing is selected until the user moves down or up."""

    can_focus = False

    def __init__(self) -> None:
        super().__init__(id="popup", compact=True, markup=False)
        self._completions: Sequence[Completion] = ()
        self.display = False

    @property
    def is_open(self) -> bool:
        return self.display

    @property
    def selected(self) -> Completion | None:
        return None if self.highlighted is None else self._completions[self.highlighted]

    @property
    def best(self) -> Completion:
        """The selected completion, else the first one."""
        return self.selected or self._completions[0]

    @property
    def only(self) -> Completion | None:
        """The completion, where there is one."""
        return self._completions[0] if len(self._completions) == 1 else None

    def completion(self, index: int) -> Completion:
        """The one of this line, which may be clicked."""
        return self._completions[index]

    def show(self, completions: Sequence[Completion]) -> None:
        """List these; none hides the list."""
        self._completions = completions[:MAX_COMPLETIONS]
        self.display = bool(completions)
        self.clear_options()
        width = max((len(each.shown) for each in self._completions), default=0)
        for each in self._completions:
            label = Text(f"{each.shown:{width}}", "bold", no_wrap=True, overflow="ellipsis")
            self.add_option(Option(label.append(f"  {each.summary}", "not bold dim") if each.summary else label))

    def close(self) -> None:
        self.show(())

    def move(self, by: int) -> None:
        """Select the next line, or the one before."""
        count = len(self._completions)
        self.highlighted = (0 if by > 0 else count - 1) if self.highlighted is None else (self.highlighted + by) % count
