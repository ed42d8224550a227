"""Splits a stream of text into text and tool calls."""

from __future__ import annotations

import re

from edgespec.text.stops import find_unfinished
from edgespec.text.tool_formats.base import AnswerPart, Schemas, ToolFormat

_HAS_ARGUMENTS = re.compile(r'"(arguments|parameters)"')


class ToolCallReader:
    """Splits the text of an answer into text and calls. A block that holds no valid call stays text."""

    def __init__(self, tool_format: ToolFormat, tools: Schemas) -> None:
        """JSON that is the whole answer counts as a call only if it calls one of `tools`."""
        self._format = tool_format
        self._tools = tools
        self._held = ""
        self._is_inside = False
        self._is_start = True  # only blanks so far
        self._is_bare = False
        self._is_after_call = False  # blank lines there are dropped

    def push(self, text: str) -> list[AnswerPart]:
        """Add `text`; returns the parts that are certain."""
        self._held += text
        parts: list[AnswerPart] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[AnswerPart]:
        """End the stream; returns the remaining parts."""
        opening = self._format.opening
        if self._is_inside and (not self._format.closing or self._is_bare):
            return self._read_block(self._held, self._held if self._is_bare else opening + self._held)
        rest = (opening if self._is_inside else "") + self._held
        return [rest] if rest else []

    def _step(self, parts: list[AnswerPart]) -> bool:
        """Consume held text up to the next marker; False if more text is needed."""
        if self._is_inside:
            return self._close(parts)
        if self._is_after_call:
            self._held = self._held.lstrip("\n")
            self._is_after_call = not self._held
        if self._format.bare and self._is_start:
            stripped = self._held.lstrip()
            if stripped.startswith("{"):
                self._held, self._is_inside, self._is_bare = stripped, True, True
                return True
            if not stripped:
                return False
        before, opening, rest = self._held.partition(self._format.opening)
        if opening:
            self._add_text(before.rstrip("\n") if not before.strip() else before, parts)
            self._held, self._is_inside = rest, True
            return True
        certain = find_unfinished(self._held, (self._format.opening,))
        self._add_text(self._held[:certain], parts)
        self._held = self._held[certain:]
        return False

    def _close(self, parts: list[AnswerPart]) -> bool:
        if not self._format.closing or self._is_bare:
            return False
        body, closing, rest = self._held.partition(self._format.closing)
        if not closing:
            return False
        parts += self._read_block(body, self._format.opening + body + closing)
        self._held, self._is_inside, self._is_after_call = rest, False, True
        return True

    def _add_text(self, text: str, parts: list[AnswerPart]) -> None:
        if text:
            parts.append(text)
            self._is_start = self._is_start and not text.strip()

    def _read_block(self, body: str, verbatim: str) -> list[AnswerPart]:
        calls = self._format.read(body, self._tools)
        if calls and self._is_bare:
            is_call = all(call.name in self._tools for call in calls) and _HAS_ARGUMENTS.search(body)
            calls = calls if is_call else None
        return [*calls] if calls else [verbatim]
