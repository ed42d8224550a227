"""Text coloured by who proposed it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from edgespec.text.stream import Piece
from edgespec.tui.sanitize import sanitize

Span = tuple[int, str, int]
"""Characters, the origin as a Piece has it, and how many tokens."""

# Names that every theme has a readable colour for; underlines and weight say the same without colour.
_COLOURS = {"ngram": "cyan", "model": "green", "model+ngram": "yellow"}
_LONG = 4  # tokens from which a run is long


def joined(spans: list[Span], pieces: Sequence[Piece]) -> None:
    """Add `pieces` to `spans`, one span for each run of one origin."""
    for piece in pieces:
        if spans and spans[-1][1] == piece.origin:
            length, _, tokens = spans[-1]
            spans[-1] = (length + len(piece.text), piece.origin, tokens + 1)
        else:
            spans.append((len(piece.text), piece.origin, 1))


def coloured(text: str, spans: Sequence[Span], drafter: str) -> Text:
    """`text` with a legend; `drafter` is what the user calls the draft model. Spans may end before the text does."""
    text = sanitize(text)
    shown = Text()
    at = 0
    for length, origin, tokens in spans:
        shown.append(text[at : at + length], _style(origin, tokens))
        at += length
    shown.append(text[at:])
    shown.append("\n\nplain: the target   ", "dim")
    present = {origin for _, origin, _ in spans if origin}
    for origin, told in (("ngram", "lookup"), ("model", drafter), ("model+ngram", f"{drafter} and lookup")):
        if origin in present:
            shown.append(told, _style(origin, 1))
            shown.append("   ")
    shown.append("bold: long runs", "dim")
    return shown


def _style(origin: str, tokens: int) -> str:
    colour = _COLOURS.get(origin)
    if colour is None:
        return ""
    return f"{colour} {'bold ' if tokens >= _LONG else ''}underline"
