"""Styles for text by the drafter that proposed each token."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.drafters import drafter_specs
from edgespec.text.stream import Piece
from edgespec.tui.blocks import MUTED, Paint, Run

Span = tuple[int, str, int]
"""(characters, origin as in Piece, tokens) of a run of tokens with one origin."""

# Of the registry's drafters, in its order. Underline and weight carry the same without color.
_COLORS = ("$text-primary", "$text-success", "$text-error", "$text-secondary", "$text-accent")
_SEVERAL = "$text-warning"  # drafters that proposed the same token
_MIN_LONG_RUN = 4  # tokens
_MAX_MARKUP = 80  # characters that are not shown between two that are
_MAX_MARKS = 4  # before a space, which may also have been added


def extend_spans(spans: list[Span], pieces: Sequence[Piece]) -> None:
    """Append `pieces`, and merge neighbors of the same origin."""
    for piece in pieces:
        if spans and spans[-1][1] == piece.origin:
            length, _, tokens = spans[-1]
            spans[-1] = (length + len(piece.text), piece.origin, tokens + 1)
        else:
            spans.append((len(piece.text), piece.origin, 1))


@dataclass(frozen=True, slots=True)
class Origins:
    """Of a part of a text: `styles` are (start, end, style) of its drafted characters."""

    source: str
    styles: tuple[tuple[int, int, str], ...]

    @classmethod
    def of(cls, text: str, spans: Sequence[Span], ends: Sequence[int], start: int, end: int) -> Origins:
        """The origins of the characters `start` to `end`; `ends` are where the spans end. They may not reach `end`."""
        styles: list[tuple[int, int, str]] = []
        for i in range(bisect_right(ends, start), bisect_left(ends, end) + 1):
            if i < len(spans) and (style := _select_style(*spans[i][1:])):
                begin = max(ends[i] - spans[i][0], start)
                styles.append((begin - start, min(ends[i], end) - start, style))
        return cls(text[start:end], tuple(styles))

    def paint(self) -> Paint:
        """Adds the styles to runs that show the source without its markup."""
        by_character = [""] * len(self.source)
        for start, end, style in self.styles:
            by_character[start:end] = [style] * (end - start)
        at = 0
        is_indent = True  # whether only spaces stand before the next character in its line

        def paint(runs: Sequence[Run]) -> list[Run]:
            nonlocal at, is_indent
            painted: list[Run] = []
            for text, styles in runs:
                for character in text:
                    limit = _MAX_MARKUP if not character.isspace() else _MAX_MARKS
                    found = self.source.find(character, at, at + limit)
                    style = by_character[found] if found >= 0 else ""
                    at = found + 1 if found >= 0 else at
                    is_indent = (is_indent and character == " ") or character == "\n"
                    more = (*styles, style) if style and not is_indent else styles
                    if painted and painted[-1][1] == more:
                        painted[-1] = (painted[-1][0] + character, more)
                    else:
                        painted.append((character, more))
            return painted

        return paint


def describe_origins(spans: Sequence[Span]) -> tuple[Run, ...]:
    """A legend of the drafters' names."""
    runs: list[Run] = [("plain: the target   ", (MUTED,))]
    for origin in sorted({origin for _, origin, _ in spans if origin}):
        runs += [(origin.replace("+", " and "), (_select_style(origin, 1),)), ("   ", ())]
    return (*runs, ("bold: long runs", (MUTED,)))


def _select_style(origin: str, tokens: int) -> str:
    if not origin or origin == "structure":
        return ""
    names = list(drafter_specs())
    color = _SEVERAL if "+" in origin else "$text"
    if origin in names:
        color = _COLORS[names.index(origin) % len(_COLORS)]
    return f"{color} {'bold ' if tokens >= _MIN_LONG_RUN else ''}underline"
