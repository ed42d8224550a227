"""The items of a conversation: messages of the user, notices, answers that grow. Each is a list of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

from edgespec.text.stream import Piece
from edgespec.tui.blocks import (
    MUTED,
    Block,
    CodeBlock,
    Document,
    Parse,
    Run,
    TextBlock,
    is_python,
    parse_code,
    parse_plain,
)
from edgespec.tui.markdown import parse_markdown
from edgespec.tui.prompt import sanitize
from edgespec.tui.settings import Origins, Span, describe_origins, extend_spans

_JUDGED = 2_000  # characters of a raw text that tell whether it is code
_USER_FILL = "on $boost"


class Item(Protocol):
    """What a transcript shows."""

    text: str

    @property
    def blocks(self) -> Sequence[Block]: ...

    def origins(self, block: Block) -> Origins | None:
        """The origins of a block's characters; None where they are not shown."""


class Branch:
    """A message that can tell which one it is of those in its place."""

    _arrows: tuple[Run, ...] = ()

    def mark(self, label: str, *, is_selected: bool) -> bool:
        """Show `label` below the message, nothing if it is empty; returns whether anything changes."""
        before, style = self._arrows, "$text-accent bold" if is_selected else MUTED
        self._arrows = ((f"{label}  ", (style,)),) if label else ()
        return self._arrows != before


class UserMessage(Branch):
    """A message of the user, as typed, with its number."""

    def __init__(self, text: str, number: int) -> None:
        self.text = text
        self.number = number
        first = f"    ▌ {number} "
        rest = "    ▌ "
        self._block = TextBlock(0, len(text), first, rest, "", "$text-primary", ((sanitize(text), ()),), _USER_FILL)

    @property
    def blocks(self) -> list[Block]:
        arrows = Arrows(first="    ▌ ", gap=None, edge="$text-primary", runs=self._arrows, fill=_USER_FILL)
        return [self._block, arrows] if self._arrows else [self._block]

    def origins(self, block: Block) -> None:
        return None


class Notice:
    """A message of the program; `kind` is "note" or "error"."""

    def __init__(self, text: str, kind: str = "note") -> None:
        self.text = text
        self.kind = kind
        prefix, style = ("▌ ", "$text-error") if kind == "error" else ("", MUTED)
        self.blocks = [TextBlock(0, len(text), prefix, prefix, "", style, ((sanitize(text), (style,)),))]

    def origins(self, block: Block) -> None:
        return None


class Fold(TextBlock):
    """The line that folds and unfolds what is below it."""


class Arrows(TextBlock):
    """The line that tells which branch a message is, at its start."""


class Thought(TextBlock):
    """A part of the reasoning."""


class Answer(Branch):
    """Reasoning in a fold, the answer as Markdown or raw, and a footer."""

    def __init__(self, *, is_raw: bool = False) -> None:
        """`is_raw`: the text is no Markdown but what a model without a chat template has written."""
        self.text = ""
        self.reasoning = ""
        self.spans: list[Span] = []
        self.footer = ""
        self.is_folded = True
        self.shows_origins = False
        self._is_raw = is_raw
        self._is_code = False
        self._shown = ""  # the text without control characters
        self._ends: list[int] = []  # of the spans, in characters of `_shown`; empty until they are needed
        self._thoughts = Document(parse_plain("  ", MUTED, kind=Thought))
        self._document = Document(self._select_parser())

    @property
    def blocks(self) -> list[Block]:
        blocks: list[Block] = []
        if self.reasoning:
            blocks.append(Fold(runs=((f"{'▶' if self.is_folded else '▼'} Reasoning", (MUTED,)),)))
            blocks += () if self.is_folded else self._thoughts.blocks
        blocks += self._document.blocks
        if self.shows_origins and self.spans:
            blocks.append(TextBlock(runs=describe_origins(self.spans)))
        if self.footer or self._arrows:
            line = Arrows if self._arrows else TextBlock
            gap = "" if blocks and isinstance(blocks[-1], CodeBlock) else None
            blocks.append(line(gap=gap, runs=(*self._arrows, (self.footer, (MUTED,)))))
        return blocks

    def origins(self, block: Block) -> Origins | None:
        if not self.shows_origins or block.end <= block.start or isinstance(block, Thought):
            return None
        if not self._ends:
            self._ends = list(accumulate(length for length, _, _ in self.spans))
            if len(self._shown) > len(self.text):  # a character is shown by several
                self._ends = [len(sanitize(self.text[:end])) for end in self._ends]
        return Origins.of(self._shown, self.spans, self._ends, block.start, block.end)

    def append(self, pieces: Sequence[Piece]) -> None:
        """Add the next pieces of the answer and its reasoning."""
        if reasoning := "".join(piece.text for piece in pieces if piece.channel == "reasoning"):
            self._think(reasoning)
        if answer := [piece for piece in pieces if piece.channel != "reasoning"]:
            extend_spans(self.spans, answer)
            self._ends.clear()
            self._grow("".join(piece.text for piece in answer))

    def show(self, text: str, reasoning: str, spans: Any, footer: str) -> None:
        """Become a stored answer."""
        self.footer = footer
        self.spans = [tuple(span) for span in spans]
        self._think(reasoning)
        self._grow(text)

    def _think(self, text: str) -> None:
        self.reasoning += sanitize(text)
        self._thoughts.update(self.reasoning)

    def _grow(self, text: str) -> None:
        self.text += text
        self._shown += sanitize(text)
        is_code = self._is_raw and is_python(self.text[:_JUDGED])
        if is_code is not self._is_code:
            self._is_code = is_code
            self._document = Document(self._select_parser())
        if self._shown:
            self._document.update(self._shown)

    def _select_parser(self) -> Parse:
        if not self._is_raw:
            return parse_markdown
        return parse_code("python") if self._is_code else parse_plain()
