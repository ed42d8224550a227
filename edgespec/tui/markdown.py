"""Markdown as blocks that show every character of it but its markup."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

from edgespec.tui.blocks import MUTED, Block, CodeBlock, RuleBlock, Run, TableBlock, TextBlock, split_parts

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token

_STYLES = {
    "strong_open": "bold",
    "em_open": "italic",
    "s_open": "strike",
    "link_open": "$text-primary underline",
}
_CODE = "$text-warning"
_MATH = "italic"
_BREAKS = ("softbreak", "hardbreak")
_BULLET = "•"
_QUOTE = "▌ "
_HEADINGS = {"h1": ("$text-primary", "bold", "underline"), "h2": ("$text-primary", "bold")}
_HEADING = ("bold",)
# Stars and underscores that are no emphasis, and formulas: a*b*c, 2**3, __init__, \(a*b*c\), $$a_1$$.
_LITERAL = re.compile(
    r"(?<=[0-9A-Za-z_)\]])(?:\*(?=[0-9A-Za-z_(\[])|\*\*(?=\d))|(?<!\w)__[a-z][a-z0-9_]*?__(?!\w)"
    r"|\\\(.+?\\\)|\\\[.+?\\\]|\$\$.+?\$\$|\$[^\s$](?:[^$\n]*[^\s$])?\$(?!\d)",
    re.DOTALL,
)
_FORMULA = re.compile(r"\\\[|\$\$")
_CLOSES = {"\\[": "\\]", "$$": "$$"}


def parse_markdown(source: str, offset: int = 0, number: int = 1) -> tuple[list[Block], int]:
    """The blocks of `source`, and where in it the last one at the top level starts: text that is appended may change
    what follows, and nothing before.

    `offset` is added to all positions; `number` is the one of the first fenced code block, as `/copy N` counts them.
    """
    tokens = _parser().parse(source)
    tops = [token.map[0] for token in tokens if token.level == 0 and token.map and token.nesting >= 0]
    starts = [0, *accumulate(len(line) + 1 for line in source.split("\n"))]
    blocks = list(_Reader(source, starts, offset, number).read(tokens))
    return blocks, starts[tops[-1]] if tops else 0


def list_code_blocks(source: str) -> list[str]:
    """The contents of the fenced code blocks, in the order of their numbers."""
    return [token.content for token in _parser().parse(source) if token.type == "fence"]


class _Reader:
    """Turns tokens into blocks; the containers around a block become what is in front of its rows."""

    def __init__(self, source: str, starts: Sequence[int], offset: int, number: int) -> None:
        """`starts` are the positions of the lines in `source`."""
        self._source = source
        self._starts = starts
        self._offset = offset
        self._number = number
        self._first = ""  # in front of the next row
        self._rest = ""  # in front of the rows after it
        self._above = ""  # in front of an empty row before them
        self._outside: list[str] = []  # the values of `_rest` around each container
        self._are_tight: list[bool] = []  # of the lists around the next block
        self._starts_list = False

    def read(self, tokens: Sequence[Token]) -> Iterator[Block]:
        i = 0
        while i < len(tokens):
            token = tokens[i]
            if token.type == "table_open":
                end = next(j for j in range(i, len(tokens)) if tokens[j].type == "table_close")
                yield self._read_table(tokens[i : end + 1])
                i = end
            elif token.type in ("paragraph_open", "heading_open"):
                yield self._read_text(token, tokens[i + 1])
                i += 2
            elif token.type in ("fence", "code_block"):
                yield from self._read_code(token)
            elif token.type == "formula":
                yield TextBlock(*self._place(token), runs=((token.content, (_MATH,)),))
            elif token.type == "hr":
                yield RuleBlock(*self._place(token))
            elif token.type in ("bullet_list_open", "ordered_list_open"):
                self._starts_list = not self._are_tight
                self._are_tight.append(_is_tight(tokens, i))
            elif token.type in ("bullet_list_close", "ordered_list_close"):
                self._are_tight.pop()
            elif token.type == "list_item_open":
                marker = f"{token.info}{token.markup} " if token.info else f"{_BULLET} "
                self._enter(marker, " " * len(marker))
            elif token.type == "blockquote_open":
                self._enter(_QUOTE, _QUOTE)
            elif token.type in ("list_item_close", "blockquote_close"):
                if self._first != self._rest:
                    yield TextBlock(*self._place(tokens[i - 1]))  # an empty item
                self._rest = self._first = self._above = self._outside.pop()
            i += 1

    def _enter(self, marker: str, rest: str) -> None:
        """Enter a container."""
        if self._first == self._rest:
            self._above = self._rest
        self._outside.append(self._rest)
        self._first += marker
        self._rest += rest

    def _place(self, token: Token) -> tuple[int, int, str, str, str | None]:
        """The first fields of a block: start, end, first, rest, gap."""
        begin, end = token.map or (0, 0)
        is_close = self._are_tight and self._are_tight[-1] and not self._starts_list
        first, gap = self._first, None if is_close else self._above
        self._first = self._above = self._rest
        self._starts_list = False
        return self._offset + self._starts[begin], self._offset + self._starts[end] - 1, first, self._rest, gap

    def _read_text(self, opening: Token, inline: Token) -> Block:
        runs = list(_read_inline(inline.children or []))
        if opening.type == "paragraph_open" and opening.level == 0:
            line = self._get_line(opening)
            runs.insert(0, (line[: len(line) - len(line.lstrip(" "))], ()))
        if opening.type == "heading_open":
            styles = _HEADINGS.get(opening.tag, _HEADING)
            runs = [(text, (*styles, *more)) for text, more in runs]
        return TextBlock(*self._place(opening), runs=tuple(runs))

    def _read_code(self, token: Token) -> Iterator[Block]:
        start, end, first, rest, gap = self._place(token)
        language, title = "", None
        if token.type == "fence":
            info = token.info.strip()
            language = info.split(maxsplit=1)[0].casefold() if info else ""
            title = f"{info or 'text'} · {self._number}"
            self._number += 1
        for part in split_parts(token.content):
            code = part.removesuffix("\n")
            yield CodeBlock(start, end, first, rest, gap, code=code, language=language, title=title)
            first, gap, title = rest, None, None

    def _get_line(self, token: Token) -> str:
        """The first line of the source that a block token covers."""
        begin = token.map[0] if token.map else 0
        return self._source[self._starts[begin] : self._starts[begin + 1] - 1]

    def _read_table(self, tokens: Sequence[Token]) -> Block:
        """A table. Cells that are missing in a row are empty; what is too much stays in the last cell."""
        place = self._place(tokens[0])
        line = ""
        rows: list[list[tuple[Run, ...]]] = []
        alignments: list[str] = []
        for token in tokens:
            if token.type == "tr_open":
                rows.append([])
                line = self._get_line(token)
            elif token.type == "tr_close" and (surplus := _split_cells(line)[len(rows[0]) :]):
                rows[-1][-1] += ((" | ".join(["", *surplus]), ()),)
            elif token.type == "inline":
                rows[-1].append(tuple(_read_inline(token.children or [])))
            elif token.type == "th_open":
                alignments.append(str(token.attrs.get("style", "")).removeprefix("text-align:") or "left")
        return TableBlock(*place, cells=tuple(map(tuple, rows)), alignments=tuple(alignments))


def _read_inline(tokens: Sequence[Token]) -> Iterator[Run]:
    """The runs of inline tokens; the address of a link follows its text."""
    styles: list[str] = []
    addresses: list[str] = []
    for token in tokens:
        if token.type in ("text", "text_special"):
            yield token.content, tuple(styles)
        elif token.type == "code_inline":
            yield token.content, (*styles, _CODE)
        elif token.type == "literal":
            yield token.content, (*styles, _MATH) if token.info else tuple(styles)
        elif token.type in _BREAKS:
            yield f"\n{token.content}", ()
        elif token.type == "image":
            yield token.content + _format_address(token, "src"), (*styles, "$text-primary")
        elif token.nesting > 0:
            styles.append(_STYLES.get(token.type, ""))
            addresses.append("" if token.info == "auto" else _format_address(token, "href"))
        elif token.nesting < 0:
            styles.pop()
            if address := addresses.pop():
                yield address, (*styles, MUTED)


def _format_address(token: Token, name: str) -> str:
    if name not in token.attrs:
        return ""
    title = f' "{token.attrs["title"]}"' if "title" in token.attrs else ""
    return f" ({token.attrs[name]}{title})"


def _split_cells(line: str) -> list[str]:
    """The cells of a table's row, in quotes too."""
    cells = re.split(r"(?<!\\)\|", line.strip(" >").removeprefix("|").removesuffix("|"))
    return [cell.strip().replace("\\|", "|") for cell in cells]


def _is_tight(tokens: Sequence[Token], at: int) -> bool:
    """Whether no empty rows are between the items of the list that opens at index `at`."""
    level = tokens[at].level
    for token in tokens[at + 1 :]:
        if token.level == level + 2 and token.type == "paragraph_open" and not token.hidden:
            return False
        if token.level == level:
            break
    return True


@cache
def _parser() -> MarkdownIt:
    """CommonMark with tables and strikethrough, and without what hides text: HTML, and definitions of links."""
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import escape, newline

    parser = MarkdownIt("commonmark", {"html": False})
    parser.enable(["table", "strikethrough"]).disable(["reference", "html_block", "html_inline"])
    parser.inline.ruler.before("escape", "literal", _read_literal)
    for name, rule in (("newline", newline), ("escape", escape)):
        parser.inline.ruler.at(name, _keep_indent(rule))
    parser.block.ruler.before("fence", "formula", _read_formula, {"alt": ["paragraph"]})
    parser.normalizeLink = lambda url: url  # type: ignore[method-assign]
    parser.normalizeLinkText = lambda link: link  # type: ignore[method-assign]
    return parser


def _read_literal(state: StateInline, silent: bool) -> bool:
    """A rule of the parser: characters that are shown as they are, formulas marked by `info`."""
    found = _LITERAL.match(state.src, state.pos, state.posMax)
    if found is None:
        return False
    if not silent:
        token = state.push("literal", "", 0)
        token.content = found.group()
        token.info = "math" if token.content[0] in "\\$" else ""
    state.pos = found.end()
    return True


def _keep_indent(read: Callable[[StateInline, bool], bool]) -> Callable[[StateInline, bool], bool]:
    """A rule that reads line breaks, so that their tokens have the spaces at the start of the next line as content."""

    def read_break(state: StateInline, silent: bool) -> bool:
        start = state.pos
        if not read(state, silent):
            return False
        if not silent and state.tokens[-1].type in _BREAKS:
            state.tokens[-1].content = state.src[start : state.pos].rpartition("\n")[2]
        return True

    return read_break


def _read_formula(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    r"""A rule of the parser: lines from \[ or $$ at the start of a line to the end of the formula."""
    begin = state.bMarks[start] + state.tShift[start]
    opening = _FORMULA.match(state.src, begin, state.eMarks[start])
    if opening is None:
        return False
    close, after, line = _CLOSES[opening.group()], opening.end(), start
    while close not in state.src[after : state.eMarks[line]]:
        line += 1
        if line >= end or state.isEmpty(line):
            return False
        after = state.bMarks[line]
    if not silent:
        token = state.push("formula", "math", 0)
        token.content = state.getLines(start, line + 1, state.sCount[start], False).strip()
        token.map = [start, line + 1]
    state.line = line + 1
    return True
