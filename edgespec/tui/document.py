"""A text that grows, as blocks: only its end is parsed again."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.tui.blocks import Block, CodeBlock, Run, TextBlock, split_parts

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
