"""Reads the answers of Functionary 3.2, each part of which begins with the name of the tool that gets it."""

from __future__ import annotations

import re

from edgespec.text.call_arguments import JsonCall
from edgespec.text.tokenizer import find_unfinished
from edgespec.text.tool_calls import NAME_CHARACTER, AnswerPart, CallStart, Schemas

_MARK = ">>>"
_FOR_USER = re.compile(r"\s*all\n")
_CALL = re.compile(rf"\s*({NAME_CHARACTER}+)[ \t]*\n\s*(?=\{{)")


class FunctionaryReader:
    """Splits a model's output at `>>>`. A part naming no tool of the request is text."""

    def __init__(self, tools: Schemas) -> None:
        self._tools = tools
        self._held = ""
        self._is_head = True  # of a part
        self._mark = ""  # in front of the head
        self._call: JsonCall | None = None
        self._n_calls = 0

    def push(self, text: str) -> list[AnswerPart]:
        """Add `text`; returns the parts that are certain."""
        self._held += text
        parts: list[AnswerPart] = []
        while self._held and self._step(parts):
            pass
        return parts

    def finish(self) -> list[AnswerPart]:
        """End the stream; returns the remaining parts."""
        if self._call is not None:
            return [self._call.finish()]
        rest = (self._mark if self._is_head else "") + self._held
        return [rest] if rest else []

    def _step(self, parts: list[AnswerPart]) -> bool:
        """Read up to the next boundary; False if more text is needed."""
        if self._call is not None:
            added, self._held, has_ended = self._call.push(self._held)
            parts += added
            self._call = None if has_ended else self._call
            return has_ended
        return self._read_head(parts) if self._is_head else self._read_text(parts)

    def _read_head(self, parts: list[AnswerPart]) -> bool:
        if (call := _CALL.match(self._held)) is not None and call[1] in self._tools:
            self._call = JsonCall(CallStart(self._n_calls, call[1]))
            parts.append(self._call.start)
            self._n_calls += 1
            self._held = self._held[call.end() :]
        elif (user := _FOR_USER.match(self._held)) is not None:
            self._held = self._held[user.end() :]
        elif self._may_become_head():
            return False
        elif self._mark:
            parts.append(self._mark)
        self._is_head, self._mark = False, ""
        return True

    def _may_become_head(self) -> bool:
        """Whether the text is the beginning of a name, or a name whose arguments have not begun."""
        text = self._held.lstrip()
        heads = [f"{name}\n" for name in (*self._tools, "all")]
        return any(head.startswith(text) or not text.removeprefix(head).strip() for head in heads)

    def _read_text(self, parts: list[AnswerPart]) -> bool:
        before, mark, rest = self._held.partition(_MARK)
        certain = len(before) if mark else find_unfinished(self._held, (_MARK,))
        if certain:
            parts.append(self._held[:certain])
        self._held = rest if mark else self._held[certain:]
        if mark:
            self._is_head, self._mark = True, mark
        return bool(mark)
