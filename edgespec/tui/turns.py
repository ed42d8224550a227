"""The widgets of a conversation: what the user said, and answers as they come."""

from __future__ import annotations

from typing import Any

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Collapsible, Markdown, Static
from textual.widgets.markdown import MarkdownStream

from edgespec.text.stream import Piece
from edgespec.tui.sanitize import sanitize
from edgespec.tui.token_colors import Span, coloured, joined


class UserMessage(Static):
    """A message of the user, as it was typed, with its number."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(Text.assemble((f"{number} ", "dim"), sanitize(text)), classes="said", markup=False)
        self.text = text
        self.number = number


class Notice(Static):
    """A sentence from the program itself."""

    def __init__(self, text: str, kind: str = "note") -> None:
        super().__init__(Text(sanitize(text)), classes=f"notice {kind}", markup=False)


class Answer(Vertical):
    """An answer: reasoning folded above, Markdown that grows, or the same text coloured by where it came from."""

    def __init__(self, source: str) -> None:
        """`source`: what drafts, for the legend."""
        super().__init__(classes="answer")
        self.text = ""
        self.reasoning = ""
        self.spans: list[Span] = []
        self._source = source
        self._stream: MarkdownStream | None = None
        self._thoughts = Static("", markup=False)
        self._fold = Collapsible(self._thoughts, title="Reasoning", collapsed=True)
        self._markdown = Markdown()
        self._origins = Static("", classes="origins", markup=False)
        self._footer = Static("", classes="foot", markup=False)
        self._shows_origins = False
        self._is_formatted = True

    def compose(self) -> ComposeResult:
        self._fold.display = self._origins.display = False
        yield self._fold
        yield self._markdown
        yield self._origins
        yield self._footer

    async def grow(self, pieces: list[Piece]) -> None:
        """Show what has come."""
        thought = "".join(piece.text for piece in pieces if piece.channel == "reasoning")
        said = [piece for piece in pieces if piece.channel != "reasoning"]
        if thought:
            self.reasoning += thought
            self._fold.display = True
            self._thoughts.update(Text(sanitize(self.reasoning)))
        if said:
            joined(self.spans, said)
            new = "".join(piece.text for piece in said)
            self.text += new
            if self._stream is None:
                self._stream = Markdown.get_stream(self._markdown)
            await self._stream.write(sanitize(new))
        if self._shows_origins:
            self._origins.update(coloured(self.text, self.spans, self._source))

    async def show(self, text: str, reasoning: str, spans: Any, foot: str, *, is_formatted: bool = True) -> None:
        """A whole answer from before, as it was written if it is not to be formatted, which is much faster."""
        self.text, self.reasoning, self.spans = text, reasoning, [tuple(span) for span in spans]
        self._fold.display = bool(reasoning)
        self._thoughts.update(Text(sanitize(reasoning)))
        self._footer.update(Text(foot))
        self._is_formatted = is_formatted
        if is_formatted:
            await self._markdown.update(sanitize(text))
        self.show_origins(self._shows_origins)

    async def finish(self, foot: str) -> None:
        """No more will come; `foot` is the line below."""
        if self._stream is not None:
            await self._stream.stop()
            self._stream = None
        self._footer.update(Text(foot))

    def fold(self, collapsed: bool) -> None:
        self._fold.collapsed = collapsed

    def show_origins(self, shown: bool) -> None:
        """The text as it was generated, coloured by who proposed it, in place of Markdown."""
        self._shows_origins = shown
        self._markdown.display = not shown and self._is_formatted
        self._origins.display = not self._markdown.display
        if shown:
            self._origins.update(coloured(self.text, self.spans, self._source))
        elif not self._is_formatted:
            self._origins.update(Text(sanitize(self.text)))
