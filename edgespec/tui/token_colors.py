"""Text colored by the drafter that proposed each token."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from edgespec.drafters import drafter_specs
from edgespec.text.stream import Piece
from edgespec.tui.sanitize import sanitize

Span = tuple[int, str, int]
"""(characters, origin as in Piece, tokens) of a run of tokens with one origin."""

# ANSI names, because every theme maps them to readable colors; underline and weight carry the same without color.
_COLORS = ("cyan", "green", "magenta", "blue", "red")  # of the registry's drafters, in its order
_SEVERAL = "yellow"  # drafters that proposed the same token
_MIN_LONG_RUN = 4  # tokens


def extend_spans(spans: list[Span], pieces: Sequence[Piece]) -> None:
    """Append `pieces`, and merge neighbors of the same origin."""
    for piece in pieces:
        if spans and spans[-1][1] == piece.origin:
            length, _, tokens = spans[-1]
            spans[-1] = (length + len(piece.text), piece.origin, tokens + 1)
        else:
            spans.append((len(piece.text), piece.origin, 1))


def color_tokens(text: str, spans: Sequence[Span]) -> Text:
    """`text` with a legend of the drafters' names. Spans may end before the text does."""
    text = sanitize(text)
    colored = Text()
    at = 0
    for length, origin, tokens in spans:
        colored.append(text[at : at + length], _select_style(origin, tokens))
        at += length
    colored.append(text[at:])
    colored.append("\n\nplain: the target   ", "dim")
    for origin in sorted({origin for _, origin, _ in spans if origin}):
        colored.append(origin.replace("+", " and "), _select_style(origin, 1))
        colored.append("   ")
    colored.append("bold: long runs", "dim")
    return colored


def _select_style(origin: str, tokens: int) -> str:
    if not origin or origin == "structure":
        return ""
    names = list(drafter_specs())
    color = _SEVERAL if "+" in origin else "default"
    if origin in names:
        color = _COLORS[names.index(origin) % len(_COLORS)]
    return f"{color} {'bold ' if tokens >= _MIN_LONG_RUN else ''}underline"
