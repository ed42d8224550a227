"""A question that Enter answers with yes, and Esc with no."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static


class Confirm(ModalScreen[bool]):
    """Dismissed with the answer."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,y", "answer(True)", "Yes"),
        Binding("escape,n", "answer(False)", "No"),
    ]

    def __init__(self, question: str, facts: str) -> None:
        """`facts` are lines below the question."""
        super().__init__()
        self._question = question
        self._facts = facts

    def compose(self) -> ComposeResult:
        with Vertical(id="confirm"):
            yield Static(self._question, id="confirm-question", markup=False)
            yield Static(self._facts, markup=False)
            yield Static("Enter yes · Esc no", id="confirm-keys", markup=False)

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)
