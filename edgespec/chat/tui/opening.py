"""The screen before the first message."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.events import DescendantFocus
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from edgespec.answers.summary import RUNTIMES, describe_drafts
from edgespec.chat import Conversation
from edgespec.engine.model_info import ModelInfo
from edgespec.models.registry import EMBEDDED_ALIAS

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
    """What the model does, examples, and the last conversations, in place of an empty conversation.

    The ids of its options are "send" and an example, or "resume" and the number of a conversation.
    """

    def __init__(self) -> None:
        super().__init__(id="opening", can_focus=False)

    def compose(self) -> ComposeResult:
        yield Static("", id="opening-model")
        yield OptionList(id="opening-list", compact=True, markup=False)
        yield Static("Tab, ↑, ↓ and Enter choose · or type a message", id="opening-keys", markup=False)

    @on(DescendantFocus)
    def _highlight(self) -> None:
        """Show where Enter, Up and Down begin."""
        listing = self.query_one("#opening-list", OptionList)
        if listing.highlighted is None:
            listing.action_first()

    def show(self, model_info: ModelInfo | None, recent: Sequence[Conversation], *, is_busy: bool) -> None:
        """`model_info` is None while no model is open, or, if the engine `is_busy`, while one is being opened."""
        is_waiting = model_info is None and is_busy
        title = Content.styled("Opening the model", "bold $foreground") if is_waiting else _describe(model_info)
        self.query_one("#opening-model", Static).update(title)
        examples: Sequence[str] = ()
        if model_info is not None and model_info.name != EMBEDDED_ALIAS:  # which repeats itself after any short text
            examples = _TEXTS if model_info.chat_template is None else _QUESTIONS
        options = [Option(_show_line(text), id=f"send {text}") for text in examples]
        if examples:
            options.insert(0, Option(Text("Try", "bold"), disabled=True))
        if recent:
            options.append(Option(Text("\nGo on with" if examples else "Go on with", "bold"), disabled=True))
        for each in recent:
            line = _show_line(each.title).append(f"  {each.model}", "dim")
            options.append(Option(line, id=f"resume {each.id}"))
        listing = self.query_one("#opening-list", OptionList)
        selected, ids = listing.highlighted_option, [each.id for each in options]
        listing.set_options(options)
        if selected is not None and selected.id in ids:
            listing.highlighted = ids.index(selected.id)
        self.query_one("#opening-keys").display = listing.option_count > 0


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
    runs = f"Runs on {RUNTIMES[model_info.backend]}, {describe_drafts(model_info.draft)}"
    state = f"{runs}, sees {model_info.context_size:,} tokens. F1 explains these words."
    return Content.assemble((model_info.name, "bold $text-primary"), (f"\n{purpose}\n", "$foreground"), state)


def _show_line(text: str) -> Text:
    """The text in one line, which may be cut."""
    return Text(f"  {' ⏎ '.join(line.strip() for line in text.splitlines() if line.strip())}", no_wrap=True,
                overflow="ellipsis")  # fmt: skip
