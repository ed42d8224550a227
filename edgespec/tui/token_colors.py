"""Text colored by the drafter that proposed each token."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from edgespec.text.stream import Piece
from edgespec.tui.sanitize import sanitize

Span = tuple[int, str, int]
"""(characters, origin as in Piece, tokens) of a run of tokens with one origin."""

# ANSI names, because every theme maps them to readable colors; underline and weight carry the same without color.
_COLORS = {"ngram": "cyan", "model": "green", "model+ngram": "yellow"}
_MIN_LONG_RUN = 4  # tokens


def extend_spans(spans: list[Span], pieces: Sequence[Piece]) -> None:
    """Append `pieces`, and merge neighbors of the same origin."""
    for piece in pieces:
        if spans and spans[-1][1] == piece.origin:
            length, _, tokens = spans[-1]
            spans[-1] = (length + len(piece.text), piece.origin, tokens + 1)
        else:
            spans.append((len(piece.text), piece.origin, 1))


def color_tokens(text: str, spans: Sequence[Span], drafter: str) -> Text:
    """`text` with a legend; `drafter` is the user's name for the draft model. Spans may end before the text does."""
    text = sanitize(text)
    colored = Text()
    at = 0
    for length, origin, tokens in spans:
        colored.append(text[at : at + length], _select_style(origin, tokens))
        at += length
    colored.append(text[at:])
    colored.append("\n\nplain: the target   ", "dim")
    used = {origin for _, origin, _ in spans if origin}
    for origin, label in (("ngram", "ngram"), ("model", drafter), ("model+ngram", f"{drafter} and ngram")):
        if origin in used:
            colored.append(label, _select_style(origin, 1))
            colored.append("   ")
    colored.append("bold: long runs", "dim")
    return colored


def _select_style(origin: str, tokens: int) -> str:
    color = _COLORS.get(origin)
    if color is None:
        return ""
    return f"{color} {'bold ' if tokens >= _MIN_LONG_RUN else ''}underline"
