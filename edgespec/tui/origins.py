"""Text coloured by who proposed it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from edgespec.text.stream import Piece

Span = tuple[int, str, int]
"""Characters, the origin as a Piece has it, and how many tokens."""

# From short runs to long ones. Underlines and weight say the same without colour.
_COLOURS = {"ngram": ("dark_cyan", "cyan", "bright_cyan"), "model": ("dark_green", "green", "bright_green"),
            "model+ngram": ("dark_goldenrod", "yellow", "bright_yellow")}  # fmt: skip
_WEIGHTS = ("underline", "underline", "bold underline")
_LONG = (3, 6)  # tokens from which a run is longer, and long


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
    shown = Text()
    at = 0
    for length, origin, tokens in spans:
        shown.append(text[at : at + length], _style(origin, tokens))
        at += length
    shown.append(text[at:])
    shown.append("\n\nplain: the target itself   ", "dim")
    present = {origin for _, origin, _ in spans if origin}
    for origin, told in (("ngram", "lookup"), ("model", drafter), ("model+ngram", f"{drafter} and lookup")):
        if origin in present:
            shown.append(told, _style(origin, 1))
            shown.append("   ")
    shown.append("bold: longer runs", "dim")
    return shown


def _style(origin: str, tokens: int) -> str:
    colours = _COLOURS.get(origin)
    if colours is None:
        return ""
    shade = sum(tokens >= long for long in _LONG)
    return f"{colours[shade]} {_WEIGHTS[shade]}"
