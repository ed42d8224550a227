"""Markdown as blocks that show every character of it but its markup."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

from edgespec.chat.tui.blocks import CELL_END, MUTED, Block, CodeBlock, RuleBlock, Run, TableBlock, split_parts

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock
    from markdown_it.rules_core import StateCore
    from markdown_it.rules_inline import StateInline
    from markdown_it.tree import SyntaxTreeNode

_STYLES = {"strong": "bold", "em": "italic", "s": "strike", "link": "$text-primary underline"}
_CODE = "$text-warning"
_MATH = "italic"
_BULLET = "•"
_MAX_EMPTY = 3  # empty rows that are kept beside the one between two blocks
_QUOTE = "▌ "
_HEADINGS = {"h1": "$text-primary bold underline", "h2": "$text-primary bold"}
_HEADING = "bold"
_INDENT = "\u1680"  # for a space at the start of a line while inlines are parsed: a space would be dropped
# Stars and underscores that are no emphasis, and formulas: a*b*c, 2**3, __init__, \(a*b*c\), $$a_1$$.
_LITERAL = re.compile(
    r"(?<=[0-9A-Za-z_)\]])(?:\*(?=[0-9A-Za-z_(\[])|\*\*(?=\d))|(?<!\w)__[a-z][a-z0-9_]*?__(?!\w)"
    r"|\\\(.+?\\\)|\\\[.+?\\\]|\$\$.+?\$\$|\$[^\s$](?:[^$\n]*[^\s$])?\$(?!\d)",
    re.DOTALL,
)
_EMPTY_LINE = re.compile(r"\n[ \t]*\n")
_FORMULA = re.compile(r"\\\[|\$\$")
_CLOSES = {"\\[": "\\]", "$$": "$$"}


def parse_markdown(source: str, offset: int = 0, number: int = 1) -> tuple[list[Block], int]:
    """The blocks of `source`, and from where on they may change when text is appended: the last one at the top
    level, or the one in which a formula may have begun.

    `offset` is added to all positions; `number` is the one of the first fenced code block, as `/copy N` counts them.
    """
    from markdown_it.tree import SyntaxTreeNode

    nodes = SyntaxTreeNode(_parser().parse(source)).children
    reader = _Reader(source, offset, number)
    blocks = list(reader.read(nodes, "", "", ""))
    starts = [reader.find(node)[0] - offset for node in nodes] or [0]
    lines = max((found.end() for found in _EMPTY_LINE.finditer(source)), default=0)  # behind the last empty one
    if lines < starts[-1] and _FORMULA.search(source, lines):  # it may end behind what now looks like several blocks
        return blocks, max((start for start in starts if start <= lines), default=0)
    return blocks, starts[-1]


def list_code_blocks(source: str) -> list[str]:
    """The contents of the fenced code blocks, in the order of their numbers."""
    return [token.content for token in _parser().parse(source) if token.type == "fence"]


class _Reader:
    """Turns nodes into blocks; the containers around a block become what is in front of its rows."""

    def __init__(self, source: str, offset: int, number: int) -> None:
        self._source = source
        self._starts = [0, *accumulate(len(line) + 1 for line in source.split("\n"))]  # of the lines
        self._offset = offset
        self._number = number

    def read(
        self, nodes: Sequence[SyntaxTreeNode], first: str, rest: str, gap: str | None, *, is_tight: bool = False
    ) -> Iterator[Block]:
        """The blocks of `nodes`. `first`, `rest` and `gap` are as in Block, for the first one; no empty rows are
        between the others if they are in a list that `is_tight`.
        """
        end = None  # the line after the node before
        for node in nodes:
            if end is not None and node.level == 0 and node.map is not None:
                for line in range(end + 1, min(node.map[0], end + 1 + _MAX_EMPTY)):
                    at = self._offset + self._starts[line]
                    yield Block(at, at, rest, rest, None)
            end = node.map[1] if node.map is not None else None
            if node.type in ("bullet_list", "ordered_list"):
                yield from self._read_list(node, first, rest, gap)
            elif node.type == "blockquote":
                yield from self.read(node.children, first + _QUOTE, rest + _QUOTE, gap)
            elif node.type in ("fence", "code_block"):
                yield from self._read_code(node, first, rest, gap)
            elif node.type == "table":
                cells, alignments = self._read_table(node)
                yield TableBlock(*self.find(node), first, rest, gap, runs=cells, alignments=alignments)
            elif node.type == "hr":
                yield RuleBlock(*self.find(node), first, rest, gap)
            else:
                yield Block(*self.find(node), first, rest, gap, runs=self._read_text(node))
            first, gap = rest, None if is_tight else rest

    def find(self, node: SyntaxTreeNode) -> tuple[int, int]:
        """The positions of a block's first character and of the end of its last line."""
        begin, end = node.map or (0, 0)
        return self._offset + self._starts[begin], self._offset + self._starts[end] - 1

    def _read_list(self, node: SyntaxTreeNode, first: str, rest: str, gap: str | None) -> Iterator[Block]:
        is_tight = all(child.type != "paragraph" or child.hidden for item in node.children for child in item.children)
        for item in node.children:
            marker = f"{item.info}{item.markup} " if item.info else f"{_BULLET} "
            inner = first + marker, rest + " " * len(marker)
            if item.children:
                yield from self.read(item.children, *inner, gap, is_tight=is_tight)
            else:
                yield Block(*self.find(item), *inner, gap)
            first, gap = rest, None if is_tight else rest

    def _read_text(self, node: SyntaxTreeNode) -> tuple[Run, ...]:
        """The runs of a paragraph, a heading or a formula."""
        if node.type == "formula":
            return ((node.content, _MATH),)
        style = _HEADINGS.get(node.tag, _HEADING) if node.type == "heading" else ""
        runs = list(_read_inline(node.children[0].children, style))
        if node.type == "paragraph" and node.level == 0:
            line = self._get_line(node)
            runs.insert(0, (line[: len(line) - len(line.lstrip(" "))], ""))
        return tuple((text.replace(_INDENT, " "), styles) for text, styles in runs)

    def _read_code(self, node: SyntaxTreeNode, first: str, rest: str, gap: str | None) -> Iterator[Block]:
        language, title, indented = "", None, node.content
        if node.type == "fence":
            info = node.info.strip()
            language = info.split(maxsplit=1)[0].casefold() if info else ""
            title = f"{info or 'text'} · {self._number}"
            self._number += 1
        elif node.level == 0:  # CommonMark drops the indent, which verses need above lines with less
            indented = "".join(
                f"    {line}" if line.strip() else line for line in node.content.splitlines(keepends=True)
            )
        for part in split_parts(indented):
            runs = ((part.removesuffix("\n"), ""),)
            yield CodeBlock(*self.find(node), first, rest, gap, runs=runs, language=language, title=title)
            first, gap, title = rest, None, None

    def _get_line(self, node: SyntaxTreeNode) -> str:
        """The first line of the source that a node covers."""
        begin = node.map[0] if node.map else 0
        return self._source[self._starts[begin] : self._starts[begin + 1] - 1]

    def _read_table(self, node: SyntaxTreeNode) -> tuple[tuple[Run, ...], tuple[str, ...]]:
        """The runs and alignments of a table, which has as many columns as its longest row: the parser drops cells
        that the header does not have.
        """
        rows = [row for section in node.children for row in section.children]
        n_titles = len(rows[0].children)
        surplus = [_split_cells(self._get_line(row))[n_titles:] for row in rows]
        n_more = max(map(len, surplus))
        runs: list[Run] = []
        for row, more in zip(rows, surplus, strict=True):
            style = "" if runs else "bold"
            for cell in row.children:
                runs += [*_read_inline(cell.children[0].children, style), (CELL_END, "")]
            for text in [*more, *[""] * (n_more - len(more))]:
                runs += [(text, ""), (CELL_END, "")]
        styles = [str(cell.attrs.get("style", "")) for cell in rows[0].children]
        alignments = [style.removeprefix("text-align:") or "left" for style in styles]
        return tuple(runs), (*alignments, *["left"] * n_more)


def _read_inline(nodes: Sequence[SyntaxTreeNode], style: str) -> Iterator[Run]:
    """The runs of inline nodes; the address of a link follows its text."""
    for node in nodes:
        if node.type in ("softbreak", "hardbreak"):
            yield "\n", ""
        elif node.type == "code_inline":
            yield node.content, f"{style} {_CODE}"
        elif node.type == "literal":
            yield node.content, f"{style} {_MATH}" if node.info else style
        elif node.type == "image":
            yield node.content + _format_address(node, "src"), f"{style} $text-primary"
        elif node.type in _STYLES:
            yield from _read_inline(node.children, f"{style} {_STYLES[node.type]}")
            if node.info != "auto":
                yield _format_address(node, "href"), f"{style} {MUTED}"
        else:
            yield node.content, style


def _format_address(node: SyntaxTreeNode, name: str) -> str:
    if name not in node.attrs:
        return ""
    title = f' "{node.attrs["title"]}"' if "title" in node.attrs else ""
    return f" ({node.attrs[name]}{title})"


def _split_cells(line: str) -> list[str]:
    """The cells of a table's row, in quotes too."""
    cells = re.split(r"(?<!\\)\|", line.strip(" >").removeprefix("|").removesuffix("|"))
    return [cell.strip().replace("\\|", "|") for cell in cells]


@cache
def _parser() -> MarkdownIt:
    """CommonMark with tables and strikethrough, and without what hides text: HTML, and definitions of links."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False})
    parser.enable(["table", "strikethrough"]).disable(["reference", "html_block", "html_inline"])
    parser.core.ruler.after("block", "indent", _keep_indents)
    parser.inline.ruler.before("escape", "literal", _read_literal)
    parser.block.ruler.before("fence", "formula", _read_formula, {"alt": ["paragraph"]})
    parser.normalizeLink = lambda url: url  # type: ignore[method-assign]
    parser.normalizeLinkText = lambda link: link  # type: ignore[method-assign]
    return parser


def _keep_indents(state: StateCore) -> None:
    """A rule of the parser: spaces at the start of a line, which the rules for line breaks drop, become _INDENT."""
    for token in state.tokens:
        if token.type == "inline":
            token.content = re.sub("(?<=\n) +", lambda found: _INDENT * len(found[0]), token.content)


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
