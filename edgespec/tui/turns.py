"""The widgets of a conversation: messages of the user, notices, answers that grow."""

from __future__ import annotations

from typing import Any

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Collapsible, Markdown, Static
from textual.widgets.markdown import MarkdownStream

from edgespec.text.stream import Piece
from edgespec.tui.sanitize import sanitize
from edgespec.tui.token_colors import Span, color_tokens, extend_spans


class UserMessage(Static):
    """A message of the user, as typed, with its number."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(Text.assemble((f"{number} ", "dim"), sanitize(text)), classes="user-message", markup=False)
        self.text = text
        self.number = number


class Notice(Static):
    """A message of the program; `kind` is "note" or "error"."""

    def __init__(self, text: str, kind: str = "note") -> None:
        super().__init__(Text(sanitize(text)), classes=f"notice {kind}", markup=False)


class Answer(Vertical):
    """Reasoning in a fold, the answer as Markdown or as colored tokens, and a footer."""

    def __init__(self) -> None:
        super().__init__(classes="answer")
        self.text = ""
        self.reasoning = ""
        self.spans: list[Span] = []
        self._stream: MarkdownStream | None = None
        self._reasoning = Static("", markup=False)
        self._fold = Collapsible(self._reasoning, title="Reasoning", collapsed=True)
        self._markdown = Markdown()
        self._colored = Static("", classes="token-colors", markup=False)
        self._footer = Static("", classes="answer-footer", markup=False)
        self._shows_colors = False
        self._is_formatted = True

    def compose(self) -> ComposeResult:
        self._fold.display = self._colored.display = False
        yield self._fold
        yield self._markdown
        yield self._colored
        yield self._footer

    async def append(self, pieces: list[Piece]) -> None:
        """Show the next pieces of the answer and its reasoning."""
        reasoning = "".join(piece.text for piece in pieces if piece.channel == "reasoning")
        answer = [piece for piece in pieces if piece.channel != "reasoning"]
        if reasoning:
            self.reasoning += reasoning
            self._fold.display = True
            self._reasoning.update(Text(sanitize(self.reasoning)))
        if answer:
            extend_spans(self.spans, answer)
            text = "".join(piece.text for piece in answer)
            self.text += text
            if self._stream is None:
                self._stream = Markdown.get_stream(self._markdown)
            await self._stream.write(sanitize(text))
        if self._shows_colors:
            self._colored.update(color_tokens(self.text, self.spans))

    async def show(self, text: str, reasoning: str, spans: Any, footer: str, *, is_formatted: bool = True) -> None:
        """Show a stored answer; as plain text unless `is_formatted`, which is much faster than Markdown."""
        self.text, self.reasoning, self.spans = text, reasoning, [tuple(span) for span in spans]
        self._fold.display = bool(reasoning)
        self._reasoning.update(Text(sanitize(reasoning)))
        self._footer.update(Text(footer))
        self._is_formatted = is_formatted
        if is_formatted:
            await self._markdown.update(sanitize(text))
        self.show_token_colors(self._shows_colors)

    async def finish(self, footer: str) -> None:
        """Complete the Markdown and show the footer; nothing is appended afterwards."""
        if self._stream is not None:
            await self._stream.stop()
            self._stream = None
        self._footer.update(Text(footer))

    def fold(self, collapsed: bool) -> None:
        """Fold or unfold the reasoning."""
        self._fold.collapsed = collapsed

    def show_token_colors(self, is_shown: bool) -> None:
        """Show the raw text, colored by drafter, in place of the Markdown; or the Markdown again."""
        self._shows_colors = is_shown
        self._markdown.display = not is_shown and self._is_formatted
        self._colored.display = not self._markdown.display
        if is_shown:
            self._colored.update(color_tokens(self.text, self.spans))
        elif not self._is_formatted:
            self._colored.update(Text(sanitize(self.text)))
