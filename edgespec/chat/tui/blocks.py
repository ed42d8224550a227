"""Blocks, the parts of a message that are laid out on their own, and the rows that they become."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Literal, NamedTuple

from pygments.token import Token
from rich._wrap import divide_line
from textual.content import Content, Span
from textual.highlight import HighlightTheme, highlight

MAX_COLUMNS = 100  # of text; lines of code and tables may be wider
CELL_END = "\x1f"
"""What stands between the cells of a table in its content."""

MUTED = "$foreground 60%"
_TAB = 4  # columns
_CODE = "on $surface"
_SKIPPED = " ▌"  # in front of a row: drawn, not copied
_MAX_MARKUP = 80  # characters that are not shown between two that are
_MAX_MARKS = 4  # before a space, which may also have been added

Run = tuple[str, str]
"""Text and its style, in Textual's notation."""


class Row(NamedTuple):
    """One line of the screen.

    skip    characters at its start that are not copied
    is_end  whether a line of the text ends here; if not, it was broken to fit
    fill    the style of the row, to MAX_COLUMNS if its text ends before
    """

    content: Content
    skip: int = 0
    is_end: bool = True
    fill: str = ""


@dataclass(frozen=True)
class Block:
    """Lines of text, wrapped at MAX_COLUMNS; the base of the other blocks. Equal blocks have equal rows.

    start, end   characters of the source that the block shows
    first, rest  text in front of its first row, and in front of the others
    gap          text in front of an empty row above it; None if there is no such row
    edge         the style of `first`, `rest` and `gap`
    fill         the style of its rows, to MAX_COLUMNS
    role         what a click on it does, or that it is a part of the reasoning
    """

    start: int = 0
    end: int = 0
    first: str = ""
    rest: str = ""
    gap: str | None = ""
    edge: str = MUTED
    runs: tuple[Run, ...] = ()
    fill: str = ""
    role: Literal["", "fold", "arrows", "thought"] = ""
    _heights: dict[int, int] = field(default_factory=dict, init=False, compare=False)

    @property
    def content(self) -> Content:
        return Content.assemble(*self.runs)

    def height(self, width: int) -> int:
        """The number of rows at `width` columns."""
        if width not in self._heights:
            plain = Content("".join(text for text, _ in self.runs))
            self._heights[width] = len(self.lay_out(width, plain))
        return self._heights[width]

    def lay_out(self, width: int, content: Content) -> list[Row]:
        """The rows of `content` at `width` columns. `content` is the block's, with any styles."""
        rows = [] if self.gap is None else [Row(Content.styled(self.gap, self.edge), len(self.gap))]
        indent = max(len(self.first), len(self.rest))
        for i, row in enumerate(self._lay_out(width - indent, content.expand_tabs(_TAB))):
            prefix = self.rest if i else self.first
            skip = len(prefix) + row.skip if row.skip else len(prefix) - len(prefix.lstrip(_SKIPPED))
            rows.append(Row(Content.assemble((prefix, self.edge), row.content), skip, row.is_end, row.fill))
        return rows

    def _lay_out(self, width: int, content: Content) -> Iterator[Row]:
        """The rows without what is in front of them."""
        return wrap(content, min(width, MAX_COLUMNS - len(self.rest)), fill=self.fill)


@dataclass(frozen=True)
class CodeBlock(Block):
    """A part of a code block. `title` is the line above it, None if there is none."""

    fill: str = _CODE
    language: str = ""
    title: str | None = None

    @property
    def content(self) -> Content:
        code = self.runs[0][0]
        spans = highlight(code, language=self.language or "text", theme=_Theme, tab_size=0).spans
        return Content(code, list(spans))

    def _lay_out(self, width: int, content: Content) -> Iterator[Row]:
        margin = " " if self.fill else ""
        if self.title is not None:
            yield Row(Content.styled(margin + self.title, f"{MUTED} bold"), len(margin), fill="on $panel")
        for row in wrap(content, width - 2 * len(margin), fill=self.fill):
            yield row._replace(content=margin + row.content, skip=len(margin))


@dataclass(frozen=True)
class RuleBlock(Block):
    """A horizontal line."""

    def _lay_out(self, width: int, content: Content) -> Iterator[Row]:
        yield Row(Content.styled("─" * min(width, MAX_COLUMNS - len(self.rest)), MUTED))


@dataclass(frozen=True)
class TableBlock(Block):
    """A table, whose cells are ended by CELL_END; the first row is the header.

    alignments  of the columns: left, center or right
    """

    alignments: tuple[str, ...] = ()

    def _lay_out(self, width: int, content: Content) -> Iterator[Row]:
        n_columns = len(self.alignments)
        cells = content.split(CELL_END)
        rows = [cells[at : at + n_columns] for at in range(0, len(cells), n_columns)]
        natural = [max(cell.cell_length for cell in column) for column in zip(*rows, strict=True)]
        widths = _share(natural, width - 3 * (n_columns - 1))
        for number, row in enumerate(rows):
            wrapped = [[each.content for each in wrap(cell, n)] for cell, n in zip(row, widths, strict=True)]
            for parts in zip_longest(*wrapped, fillvalue=Content("")):
                aligned = map(_align, parts, widths, self.alignments)
                yield Row(Content.styled(" │ ", MUTED).join(aligned))
            if not number:
                yield Row(Content.styled("─┼─".join("─" * n for n in widths), MUTED))


def wrap(content: Content, width: int, fill: str = "") -> Iterator[Row]:
    """The rows of all lines of `content`; spaces at which a line is broken stay at the end of its row."""
    for line in content.split(allow_blank=True):
        *parts, last = line.divide(divide_line(line.plain, max(1, width)))
        yield from (Row(part, is_end=False, fill=fill) for part in parts)
        yield Row(last, fill=fill)


def _share(natural: Sequence[int], total: int) -> list[int]:
    """Widths of columns that fit into `total`: narrow columns as wide as they are, the others alike."""
    widest = max(natural)
    while widest > 1 and sum(min(width, widest) for width in natural) > total:
        widest -= 1
    return [max(1, min(width, widest)) for width in natural]


def _align(cell: Content, width: int, alignment: str) -> Content:
    cell = cell.rstrip()
    blank = max(0, width - cell.cell_length)
    left = {"right": blank, "center": blank // 2}.get(alignment, 0)
    return cell.pad(left, blank - left)


class _Theme(HighlightTheme):
    """The styles of source code."""

    STYLES = {  # noqa: RUF012 - declared so by Textual
        Token.Comment: "$foreground 60% italic",
        Token.Generic.Deleted: "$text-error",
        Token.Generic.Inserted: "$text-success",
        Token.Generic.Heading: "bold",
        Token.Keyword: "$text-accent",
        Token.Keyword.Constant: "$text-warning",
        Token.Literal.Number: "$text-warning",
        Token.Literal.String: "$text-success",
        Token.Name.Builtin: "$text-secondary",
        Token.Name.Class: "$text-primary bold",
        Token.Name.Decorator: "$text-secondary",
        Token.Name.Function: "$text-primary",
        Token.Name.Tag: "$text-primary",
        Token.Name.Attribute: "$text-secondary",
        Token.Operator.Word: "$text-accent",
    }


def paint(content: Content, origins: Sequence[Run]) -> Content:
    """Add the styles of `origins` to `content`, which shows their text without markup."""
    source = "".join(text for text, _ in origins)
    styles = [style for text, style in origins for _ in text]
    spans: list[Span] = []
    at = 0
    is_indent = True  # whether only spaces stand before the next character in its line
    for i, character in enumerate(content.plain):
        found = source.find(character, at, at + (_MAX_MARKS if character.isspace() else _MAX_MARKUP))
        is_indent = character == "\n" or (is_indent and character == " ")
        if found >= 0:
            at = found + 1
            if styles[found] and not is_indent:
                spans.append(Span(i, i + 1, styles[found]))
    return content.add_spans(spans).simplify()


Parse = Callable[[str, int, int], tuple[list[Block], int]]
"""Turns a text, its position and the number of its first code block into its blocks, and where the last begins."""


class Document:
    """The blocks of a text that grows: only its end is parsed again."""

    def __init__(self, parse: Parse) -> None:
        self.blocks: list[Block] = []
        self._parse = parse
        self._tail = 0  # where the text that may still change starts
        self._n_final = 0  # blocks before it
        self._number = 1  # of the next code block

    def update(self, text: str) -> None:
        """Show `text`, which begins with the text of the last update."""
        blocks, last = self._parse(text[self._tail :], self._tail, self._number)
        known = {block: block for block in self.blocks[self._n_final :]}  # whose heights are known
        self.blocks[self._n_final :] = [known.get(block, block) for block in blocks]
        self._tail += last
        final = [block for block in blocks if block.start < self._tail]
        self._n_final += len(final)
        self._number += sum(isinstance(block, CodeBlock) and block.title is not None for block in final)


def split_parts(text: str) -> list[str]:
    """`text` cut after line feeds into parts that do not change when it grows, except for the last one.

    A cut is made after an empty line and before one that is not indented, outside of strings and comments of several
    lines as far as a count of their marks tells, and in any case after 200 lines.
    """
    parts: list[str] = []
    lines: list[str] = []
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        is_break = len(lines) >= 30 and not lines[-1].strip() and not line[:1].isspace()
        if len(lines) >= 200 or (is_break and _is_balanced("".join(lines))):
            parts.append("".join(lines))
            lines = []
        lines.append(line)
    return [*parts, "".join(lines)]


def _is_balanced(code: str) -> bool:
    """Whether no multi-line string or comment seems to be open at the end."""
    is_closed = code.count('"""') % 2 == 0 and code.count("'''") % 2 == 0
    return is_closed and code.count("/*") <= code.count("*/")


def _parse_parts(
    text: str, offset: int, number: int, *, make: Callable[..., Block], style: str = ""
) -> tuple[list[Block], int]:
    """A parser of raw text, of which each part becomes a block."""
    blocks: list[Block] = []
    start = offset
    for part in split_parts(text):
        runs = ((part.removesuffix("\n"), style),)
        blocks.append(make(start, start + len(part), gap=None if start else "", runs=runs))
        start += len(part)
    return blocks, blocks[-1].start - offset


parse_plain = partial(_parse_parts, make=Block)
parse_python = partial(_parse_parts, make=partial(CodeBlock, language="python", fill=""))
parse_thoughts = partial(_parse_parts, make=partial(Block, first="  ", rest="  ", role="thought"), style=MUTED)
