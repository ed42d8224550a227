"""Splits a stream of text into text and tool calls."""

from __future__ import annotations

import re

from edgespec.text.stops import find_unfinished
from edgespec.text.tool_formats.arguments import OpenCall, whole_call
from edgespec.text.tool_formats.base import AnswerPart, CallEnd, Schemas, ToolFormat

_HAS_ARGUMENTS = re.compile(r'"(arguments|parameters)"')


class ToolCallReader:
    """Splits the text of an answer into text and calls. A block that holds no call stays text.

    Arguments are passed on while they are written, once the name and the beginning of a JSON object have been read.
    They may turn out not to be valid JSON then. All other calls are read when their block ends, each as one delta:
    those in Qwen3-Coder's tags, those with arguments before the name, and those with arguments inside a string.
    """

    def __init__(self, tool_format: ToolFormat, tools: Schemas) -> None:
        """JSON that is the whole answer counts as a call only if it calls one of `tools`."""
        self._format = tool_format
        self._tools = tools
        self._held = ""
        self._is_inside = False
        self._is_start = True  # only blanks so far
        self._is_bare = False
        self._is_after_call = False  # blank lines there are dropped
        self._call: OpenCall | None = None
        self._n_calls = 0
        self._n_before = 0  # calls before the present block

    def push(self, text: str) -> list[AnswerPart]:
        """Add `text`; returns the parts that are certain."""
        self._held += text
        parts: list[AnswerPart] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[AnswerPart]:
        """End the stream; returns the remaining parts."""
        if self._call is not None:
            return [self._call.finish()]
        if self._is_inside:
            return self._end_block(self._held, self._held if self._is_bare else self._format.opening + self._held)
        return [self._held] if self._held else []

    def _step(self, parts: list[AnswerPart]) -> bool:
        """Consume held text up to the next boundary; False if more text is needed."""
        if self._call is not None:
            return self._read_arguments(self._call, parts)
        if self._is_inside:
            return self._read_block(parts)
        return self._read_text(parts)

    def _read_text(self, parts: list[AnswerPart]) -> bool:
        if self._is_after_call:
            self._held = self._held.lstrip("\n")
            self._is_after_call = not self._held
        if self._format.bare and self._is_start:
            stripped = self._held.lstrip()
            if stripped.startswith("{"):
                self._held, self._is_bare = stripped, True
                self._enter_block()
                return True
            if not stripped:
                return False
        before, opening, rest = self._held.partition(self._format.opening)
        if opening:
            self._add_text(before.rstrip("\n") if not before.strip() else before, parts)
            self._held = rest
            self._enter_block()
            return True
        certain = find_unfinished(self._held, (self._format.opening,))
        self._add_text(self._held[:certain], parts)
        self._held = self._held[certain:]
        return False

    def _add_text(self, text: str, parts: list[AnswerPart]) -> None:
        if text:
            parts.append(text)
            self._is_start = self._is_start and not text.strip()

    def _enter_block(self) -> None:
        self._is_inside, self._n_before = True, self._n_calls

    def _read_block(self, parts: list[AnswerPart]) -> bool:
        """Go on to the arguments of the next call, or to the end of the block."""
        syntax = self._format.syntax
        head = (syntax.later if self._n_calls > self._n_before else syntax.first).match(self._held)
        if head is not None and (not self._is_bare or head[head.lastindex or 0] in self._tools):
            self._call = OpenCall(self._n_calls, head[head.lastindex or 0])
            self._n_calls += 1
            self._held = self._held[head.end() :]
            parts.append(self._call.start)
            return True
        if not self._format.closing or self._is_bare:
            return False
        body, closing, rest = self._held.partition(self._format.closing)
        if not closing:
            return False
        parts += self._end_block(body, self._format.opening + body + closing)
        self._held, self._is_inside, self._is_after_call = rest, False, True
        return True

    def _read_arguments(self, call: OpenCall, parts: list[AnswerPart]) -> bool:
        added, self._held = call.push(self._held)
        parts += added
        if not isinstance(added[-1] if added else None, CallEnd):
            return False
        self._call = None
        return True

    def _end_block(self, body: str, verbatim: str) -> list[AnswerPart]:
        """The calls of a block that have not been read yet, or its text."""
        if self._n_calls > self._n_before:
            rest = self._format.syntax.rest.match(body)
            body = verbatim = body[rest.end() if rest else 0 :]
            if not body:
                return []
        calls = self._format.read(body, self._tools)
        if calls and self._is_bare:
            is_call = all(call.name in self._tools for call in calls) and _HAS_ARGUMENTS.search(body)
            calls = calls if is_call else None
        if not calls:
            return [verbatim]
        first, self._n_calls = self._n_calls, self._n_calls + len(calls)
        return [part for i, call in enumerate(calls, first) for part in whole_call(i, call)]
