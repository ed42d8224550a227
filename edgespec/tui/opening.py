"""The screen before the first message: what the model does, examples, and the last conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from edgespec.conversations import Conversation
from edgespec.registry.schema import EMBEDDED_ALIAS
from edgespec.service.client import ModelInfo

_TEXTS = (
    "The three most important rules of clear writing are",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
)
_QUESTIONS = (
    "Explain in two sentences what a rainbow is.",
    "Give me three tips for a good night's sleep.",
    "Why is the sky blue? Answer in two sentences.",
)


class Opening(VerticalScroll):
    """Shown in place of an empty conversation."""

    @dataclass(eq=False)
    class Chosen(Message):
        """The user wants to send the example `text`, or to go on with conversation `id` where there is no text."""

        text: str
        id: int | None

    def __init__(self) -> None:
        super().__init__(id="opening", can_focus=False)
        self._choices: list[Opening.Chosen] = []

    def compose(self) -> ComposeResult:
        yield Static("", id="opening-model")
        yield OptionList(id="opening-list", compact=True, markup=False)
        yield Static("Tab, ↑, ↓ and Enter choose · or type a message", id="opening-keys", markup=False)

    def show(self, model_info: ModelInfo | None, recent: Sequence[Conversation], *, is_busy: bool) -> None:
        """`model_info` is None while no model is open, or, if the engine `is_busy`, while one is being opened."""
        is_waiting = model_info is None and is_busy
        title = Content.styled("Opening the model", "bold $foreground") if is_waiting else _describe(model_info)
        self.query_one("#opening-model", Static).update(title)
        listing = self.query_one("#opening-list", OptionList)
        self._choices = []
        listing.clear_options()
        examples = _select_examples(model_info) if model_info is not None else ()
        if examples:
            listing.add_option(Option(Text("Try", "bold"), disabled=True))
            for text in examples:
                self._choices.append(self.Chosen(text, None))
                listing.add_option(Option(_show_line(text), id=str(len(self._choices) - 1)))
        if recent:
            listing.add_option(Option(Text("\nGo on with" if self._choices else "Go on with", "bold"), disabled=True))
        for conversation in recent:
            self._choices.append(self.Chosen("", conversation.id))
            line = _show_line(conversation.title).append(f"  {conversation.model}", "dim")
            listing.add_option(Option(line, id=str(len(self._choices) - 1)))
        self.query_one("#opening-keys").display = bool(self._choices)

    def on_option_list_option_selected(self, message: OptionList.OptionSelected) -> None:
        message.stop()
        if message.option_id is not None:
            self.post_message(self._choices[int(message.option_id)])


def _describe(model_info: ModelInfo | None) -> Content:
    if model_info is None:
        return Content.assemble(("No model is open", "bold $foreground"), "\nCtrl+G lists models.")
    if model_info.name == EMBEDDED_ALIAS:
        purpose = (
            "Completes Python code that you begin. A very small pair of models that comes with edgespec; "
            "Ctrl+G lists models that answer questions."
        )
    elif model_info.chat_template is None:
        purpose = "Continues the text that you begin; it was not trained to answer questions."
    else:
        purpose = "Answers messages."
    draft = " + ".join(model_info.drafters) or "none"
    state = f"{model_info.backend} · draft {draft} · {model_info.context_size:,} tokens of context"
    return Content.assemble((model_info.name, "bold $text-primary"), (f"\n{purpose}\n", "$foreground"), state)


def _select_examples(model_info: ModelInfo) -> Sequence[str]:
    """The examples for a model; none for the embedded pair, which repeats itself after any short text."""
    if model_info.name == EMBEDDED_ALIAS:
        return ()
    return _TEXTS if model_info.chat_template is None else _QUESTIONS


def _show_line(text: str) -> Text:
    """The text in one line, which may be cut."""
    return Text(f"  {' ⏎ '.join(line.strip() for line in text.splitlines() if line.strip())}", no_wrap=True,
                overflow="ellipsis")  # fmt: skip
