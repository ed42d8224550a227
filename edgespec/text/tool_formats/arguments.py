"""The arguments of a call while a model writes them: a JSON object in a stream of text."""

from __future__ import annotations

import re

from edgespec.text.tool_formats.base import CallDelta, CallEnd, CallStart, ToolCall

_OUTSIDE = re.compile(r'["{}\[\]<]')  # "<" is no JSON: the markup behind arguments that were not closed
_INSIDE = re.compile(r'["\\\x00-\x1f]')


class OpenCall:
    """A call whose arguments are being written. They are passed on as they are, except that control characters in
    strings, which JSON forbids, are escaped.
    """

    def __init__(self, index: int, name: str) -> None:
        self.start = CallStart(index, name)
        self._arguments: list[str] = []
        self._depth = 0
        self._is_inside = False  # of a string
        self._is_escaped = False  # the next character of the string

    def push(self, text: str) -> tuple[list[CallDelta | CallEnd], str]:
        """The parts that `text` adds, and the text behind the arguments, which is empty while they may go on."""
        out, at, has_ended = list[str](), 0, False
        while at < len(text) and not has_ended:
            if self._is_escaped:
                out.append(text[at])
                at, self._is_escaped = at + 1, False
                continue
            found = (_INSIDE if self._is_inside else _OUTSIDE).search(text, at)
            if found is None:
                out.append(text[at:])
                at = len(text)
                break
            out.append(text[at : found.start()])
            at = found.start()
            if has_ended := found[0] == "<" and not self._is_inside:
                break
            out.append(self._take(found[0]))
            at, has_ended = at + 1, self._depth == 0
        parts: list[CallDelta | CallEnd] = []
        if delta := "".join(out):
            self._arguments.append(delta)
            parts.append(CallDelta(self.start.index, delta))
        if has_ended:
            parts.append(self.finish())
        return parts, text[at:]

    def finish(self) -> CallEnd:
        """The end of the call, wherever it is."""
        arguments = "".join(self._arguments)
        return CallEnd(self.start.index, ToolCall(self.start.name, arguments), is_cut=self._depth > 0 or not arguments)

    def _take(self, character: str) -> str:
        """Note a character that delimits; returns it as JSON has it."""
        if self._is_inside and character < " ":
            return f"\\u{ord(character):04x}"
        if character == '"':
            self._is_inside = not self._is_inside
        elif self._is_inside:
            self._is_escaped = True
        else:
            self._depth += 1 if character in "{[" else -1
        return character


def whole_call(index: int, call: ToolCall) -> list[CallStart | CallDelta | CallEnd]:
    """The parts of a call of which all is known at once."""
    return [CallStart(index, call.name), CallDelta(index, call.arguments), CallEnd(index, call)]
