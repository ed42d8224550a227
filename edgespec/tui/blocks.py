"""Blocks, the parts of a message that are laid out on their own, and the rows that they become."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Token
from pygments.util import ClassNotFound
from rich.cells import cell_len, split_graphemes

MAX_COLUMNS = 100  # of text; lines of code and tables may be wider
_TAB = 4  # columns
MUTED = "$foreground 60%"
_CODE = "on $surface"
# A space, a character of a script without spaces, or a word.
_PIECE = re.compile("[ ]+|[\u2e80-\ud7a3\uf900-\ufaff\uff00-\uffef]|[^ \u2e80-\ud7a3\uf900-\ufaff\uff00-\uffef]+")
_SKIPPED = " ▌"  # in front of a row: drawn, not copied

Run = tuple[str, tuple[str, ...]]
"""Text and its styles, in Textual's notation; a later style goes over an earlier one."""
Paint = Callable[[Sequence[Run]], Sequence[Run]]
"""Adds styles to runs; it is given all runs of a block in the order of the source."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the screen.

    skip   characters at its start that are not copied
    joint  what stood between this row and the next one: a line feed, or what a line was broken at
    fill   the style of the row, to MAX_COLUMNS where its text ends before
    """

    runs: tuple[Run, ...]
    skip: int = 0
    joint: str = "\n"
    fill: str = ""

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.runs)


@dataclass(frozen=True, slots=True)
class Block:
    """The base of all blocks. Equal blocks have equal rows.

    start, end   characters of the source that the block shows
    first, rest  in front of its first row and of the others
    gap          in front of an empty row above it; None where there is no such row
    edge         the style of `first` and `rest`
    """

    start: int = 0
    end: int = 0
    first: str = ""
    rest: str = ""
    gap: str | None = ""
    edge: str = MUTED

    def lay_out(self, width: int, paint: Paint | None = None) -> list[Row]:
        """The rows at `width` columns. Without `paint`, only their number is right: code has no styles."""
        above = [] if self.gap is None else [Row(((self.gap, (self.edge,)),), skip=len(self.gap))]
        return above + self._rows(width, paint)

    def _rows(self, width: int, paint: Paint | None) -> list[Row]:
        raise NotImplementedError

    def _prefix(self, rows: Iterable[Row]) -> list[Row]:
        """`rows` with `first` and `rest` in front of them."""
        prefixed = []
        for i, row in enumerate(rows):
            prefix = self.rest if i else self.first
            skip = len(prefix) - len(prefix.lstrip(_SKIPPED))
            prefixed.append(Row(((prefix, (self.edge,)), *row.runs), skip, row.joint, row.fill))
        return prefixed


@dataclass(frozen=True, slots=True)
class TextBlock(Block):
    """Lines of text, wrapped at MAX_COLUMNS."""

    runs: tuple[Run, ...] = ()
    fill: str = ""

    def _rows(self, width: int, paint: Paint | None) -> list[Row]:
        columns = max(1, min(width, MAX_COLUMNS) - len(self.rest))
        runs = paint(self.runs) if paint else self.runs
        broken = (each for line in split_lines(runs) for each in wrap(line, columns))
        return self._prefix(Row(tuple(runs), 0, joint, self.fill) for runs, joint in broken)


@dataclass(frozen=True, slots=True)
class CodeBlock(Block):
    """A part of a code block. `title` is the line above it, None where there is none; `fill` its background."""

    code: str = ""
    language: str = ""
    title: str | None = None
    fill: str = _CODE

    def _rows(self, width: int, paint: Paint | None) -> list[Row]:
        margin = 1 if self.fill else 0
        columns = max(1, width - len(self.rest) - 2 * margin)
        rows = []
        if self.title is not None:
            rows.append(Row(((" " * margin + self.title, (MUTED, "bold")),), fill="on $panel"))
        runs = paint(highlight(self.code, self.language)) if paint else [(self.code, ())]
        for line in split_lines(runs):
            for runs, joint in wrap(line, columns, at_spaces=False):
                rows.append(Row(((" " * margin, ()), *runs), 0, joint, self.fill))
        prefixed = self._prefix(rows)
        return [Row(row.runs, len(row.runs[0][0]) + margin, row.joint, row.fill) for row in prefixed]


@dataclass(frozen=True, slots=True)
class RuleBlock(Block):
    """A horizontal line."""

    def _rows(self, width: int, paint: Paint | None) -> list[Row]:
        columns = max(1, min(width, MAX_COLUMNS) - len(self.rest))
        return self._prefix([Row((("─" * columns, (MUTED,)),))])


@dataclass(frozen=True, slots=True)
class TableBlock(Block):
    """A table. Each row has as many cells as `alignments`, which are left, center or right; the first is the header."""

    cells: tuple[tuple[tuple[Run, ...], ...], ...] = ()
    alignments: tuple[str, ...] = ()

    def _rows(self, width: int, paint: Paint | None) -> list[Row]:
        natural = [max(cell_len(_text(cell)) for cell in column) for column in zip(*self.cells, strict=True)]
        widths = _share(natural, width - len(self.rest) - 3 * (len(natural) - 1))
        rows: list[Row] = []
        for i, cells in enumerate(self.cells):
            style = () if i else ("bold",)
            painted = [[(text, (*style, *styles)) for text, styles in (paint or list)(cell)] for cell in cells]
            columns = [[runs for runs, _ in wrap(cell, n)] for cell, n in zip(painted, widths, strict=True)]
            for line in range(max(map(len, columns))):
                parts = [column[line] if line < len(column) else [] for column in columns]
                rows.append(Row(tuple(self._join(parts, widths))))
            if not i:
                rows.append(Row((("─┼─".join("─" * n for n in widths), (MUTED,)),)))
        return self._prefix(rows)

    def _join(self, parts: Sequence[Sequence[Run]], widths: Sequence[int]) -> Iterator[Run]:
        for i, (runs, width, alignment) in enumerate(zip(parts, widths, self.alignments, strict=True)):
            if i:
                yield " │ ", (MUTED,)
            blank = max(0, width - cell_len(_text(runs)))
            left = {"right": blank, "center": blank // 2}.get(alignment, 0)
            yield " " * left, ()
            yield from runs
            yield " " * (blank - left), ()


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


def split_lines(runs: Iterable[Run]) -> list[list[Run]]:
    """The runs of each line."""
    lines: list[list[Run]] = [[]]
    for text, styles in runs:
        head, *rest = text.split("\n")
        lines[-1].append((head, styles))
        lines.extend([(each, styles)] for each in rest)
    return lines


def wrap(line: Sequence[Run], width: int, *, at_spaces: bool = True) -> list[tuple[list[Run], str]]:
    """The rows of one line, and what follows each: the spaces it was broken at, nothing, or the line's end."""
    line = list(_expand_tabs(line))
    text = _text(line)
    if cell_len(text) <= width:
        return [(line, "\n")]
    cuts = list(_find_cuts(text, width, at_spaces))
    starts = [0, *(start for _, start in cuts)]
    ends = [*(end for end, _ in cuts), len(text)]
    joints = [*(text[end:start] for end, start in cuts), "\n"]
    return [(_slice(line, start, end), joint) for start, end, joint in zip(starts, ends, joints, strict=True)]


def _expand_tabs(line: Sequence[Run]) -> Iterator[Run]:
    column = 0
    for text, styles in line:
        shown = (" " * (column % _TAB) + text).expandtabs(_TAB)[column % _TAB :]
        column += len(shown)
        yield shown, styles


def _find_cuts(text: str, width: int, at_spaces: bool) -> Iterator[tuple[int, int]]:
    """Yield where each row ends and the next one starts, as indices into `text`."""
    used = 0
    space = 0  # where the spaces before the present piece begin
    for piece in _PIECE.finditer(text) if at_spaces else re.finditer(".+", text, re.DOTALL):
        cells = cell_len(piece.group())
        is_space = piece.group()[0] == " " and at_spaces
        if used + cells > width:
            if is_space:
                yield piece.start(), piece.end()
                used, space = 0, piece.end()
                continue
            if used and cells <= width:
                yield space, piece.start()
                used = 0
            else:
                for start, _, size in split_graphemes(piece.group())[0]:
                    if used and used + size > width:
                        yield piece.start() + start, piece.start() + start
                        used = 0
                    used += size
                space = piece.end()
                continue
        used += cells
        if not is_space:
            space = piece.end()


def _slice(runs: Iterable[Run], start: int, end: int) -> list[Run]:
    sliced, at = [], 0
    for text, styles in runs:
        if part := text[max(0, start - at) : max(0, end - at)]:
            sliced.append((part, styles))
        at += len(text)
    return sliced


def _share(natural: Sequence[int], total: int) -> list[int]:
    """Widths of columns that fit into `total`: narrow columns as wide as they are, the others alike."""
    widths = dict(enumerate(natural))
    wide = list(widths)
    left = total
    while wide:
        share = max(1, left // len(wide))
        fitting = [i for i in wide if natural[i] <= share]
        if not fitting:
            widths.update(dict.fromkeys(wide, share))
            break
        left -= sum(natural[i] for i in fitting)
        wide = [i for i in wide if i not in fitting]
    return [max(1, width) for width in widths.values()]


def _text(runs: Iterable[Run]) -> str:
    return "".join(text for text, _ in runs)


def _is_balanced(code: str) -> bool:
    """Whether no string or comment of several lines seems to be open at the end."""
    is_closed = code.count('"""') % 2 == 0 and code.count("'''") % 2 == 0
    return is_closed and code.count("/*") <= code.count("*/")


# A text that grows, as blocks: only its end is parsed again.


Parse = Callable[[str, int, int], tuple[list[Block], int]]
"""Turns a text, its position and the number of its first code block into its blocks, and where the last begins."""


class Document:
    """The blocks of a text."""

    def __init__(self, parse: Parse) -> None:
        self.blocks: list[Block] = []
        self._parse = parse
        self._tail = 0  # where the text that may still change starts
        self._n_final = 0  # blocks before it
        self._number = 1  # of the next code block

    def update(self, text: str) -> None:
        """Show `text`, which begins with the text of the last update."""
        blocks, last = self._parse(text[self._tail :], self._tail, self._number)
        self.blocks[self._n_final :] = blocks
        self._tail += last
        final = [block for block in blocks if block.start < self._tail]
        self._n_final += len(final)
        self._number += sum(isinstance(block, CodeBlock) and block.title is not None for block in final)


def parse_code(language: str) -> Parse:
    """A parser of raw source code."""

    def parse(text: str, offset: int, number: int) -> tuple[list[Block], int]:
        parts = _place_parts(text, offset)
        blocks = [
            CodeBlock(start, end, gap=None if start else "", code=part.removesuffix("\n"), language=language, fill="")
            for start, end, part in parts
        ]
        return list(blocks), parts[-1][0] - offset

    return parse


def parse_plain(indent: str = "", *styles: str, kind: type[TextBlock] = TextBlock) -> Parse:
    """A parser of raw text, shown behind `indent` in blocks of that kind."""

    def parse(text: str, offset: int, number: int) -> tuple[list[Block], int]:
        parts = _place_parts(text, offset)
        blocks: list[Block] = []
        for start, end, part in parts:
            runs: tuple[Run, ...] = ((part.removesuffix("\n"), styles),)
            blocks.append(kind(start, end, indent, indent, None if start else "", runs=runs))
        return blocks, parts[-1][0] - offset

    return parse


def _place_parts(text: str, offset: int) -> list[tuple[int, int, str]]:
    """Start, end and text of each part of `text`."""
    places: list[tuple[int, int, str]] = []
    for part in split_parts(text):
        places.append((offset, offset + len(part), part))
        offset += len(part)
    return places


# Source code with the styles of its language.


_STYLES = {
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
_PYTHON_LINE = re.compile(
    r"\s*(?:(?:def|class)\s+\w+.*:?|@\w[\w.]*.*|import\s+[\w., ]+|from\s+[\w.]+\s+import\s.+|return\b.*"
    r"|(?:if|elif|for|while|with|try|except|else|finally)\b.*:|self\.\w+.*|\w+ = .+|>>> .+)"
)


def highlight(code: str, language: str) -> list[tuple[str, tuple[str, ...]]]:
    """`code` in runs of one style; in one run where `language` is not known to Pygments."""
    lexer = _find_lexer(language)
    if lexer is None:
        return [(code, ())]
    runs = [(text, _select_styles(token)) for _, token, text in lexer.get_tokens_unprocessed(code)]
    return runs if "".join(text for text, _ in runs) == code else [(code, ())]


def is_python(text: str) -> bool:
    """Whether a text, as a model that completes texts writes it, looks like Python: half of its lines do."""
    lines = [line for line in text.splitlines() if line.strip()]
    return 2 * sum(_PYTHON_LINE.fullmatch(line) is not None for line in lines) >= len(lines) > 0


def may_be_code(text: str) -> bool:
    """Whether a message may be the beginning of code: it looks like Python, or has characters that prose seldom has."""
    return is_python(text) or any(each in "()[]{}<>=#@_" for each in text)


@lru_cache(64)
def _find_lexer(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language) if language else None
    except ClassNotFound:
        return None


@lru_cache(512)
def _select_styles(token: Any) -> tuple[str, ...]:
    """The styles of the token, or of the nearest kind that has some."""
    while token is not None:
        if token in _STYLES:
            return (_STYLES[token],)
        token = token.parent
    return ()
