"""Tool calls, and how a family of models writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.text.tokenizer import find_unfinished


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of the tool `name`; `arguments` is a JSON object as text, or its beginning where the call was cut."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a call; `index` counts the calls of an answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of a call's arguments. The deltas of a call, joined, are its arguments."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call. `is_cut`: its arguments are not complete."""

    index: int
    call: ToolCall
    is_cut: bool = False


AnswerPart = str | CallStart | CallDelta | CallEnd
NAME_CHARACTER = "[A-Za-z0-9_.:/-]"
"""Regular expression of one character of a tool's name."""
Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's arguments, by the tool's name."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The text around the JSON of calls, for an answer that must consist of calls.

    before, after  text around each call; "{name}" stands for the tool's name, and then the JSON is the arguments alone
    first, last    text around all calls
    between        text between two calls; None where an answer holds one call
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    between: tuple[str, ...] | None = None

    @property
    def holds_name(self) -> bool:
        return any("{name}" in part for part in self.before)


class CallSyntax:
    """Finds the arguments of a call, for calls whose arguments are a JSON object that follows their name.

    first  matches the text before the arguments of a block's first call; its one group that takes part is the name
    later  the same for the other calls of a block, from the end of the arguments before
    rest   matches what belongs to a call behind its arguments; it may be empty
    """

    def __init__(self, head: str, rest: str) -> None:
        """`head` and `rest` are regular expressions. `head` ends before the object."""
        self.first = re.compile(head)
        self.later = re.compile(rest + head)
        self.rest = re.compile(rest)


_MEMBERS = r'(?:"(?!name"|arguments"|parameters")\w+"\s*:\s*"[^"\\]*"\s*,\s*)*'
JSON_HEAD = (
    rf'[\s;,\[]*\{{\s*{_MEMBERS}"name"\s*:\s*"([^"\\]+)"\s*,\s*{_MEMBERS}"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
JSON_REST = r'(?:\s*,\s*"\w+"\s*:\s*(?:"[^"\\]*"|[\w.+-]+))*\s*\}*[\s;,\]]*'
JSON_CALLS = CallSyntax(JSON_HEAD, JSON_REST)
"""Calls that are JSON objects with a name and arguments."""


def load_json(text: str, default: Any = None) -> Any:
    """The value of a JSON text; `default` for any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return default


_BETWEEN = " \t\r\n;,]"  # calls in a row


def read_json_calls(body: str, _: Schemas) -> list[ToolCall] | None:
    """The calls of one JSON object, a list of objects, or several in a row, separated by ';' or blanks."""
    calls: list[ToolCall] = []
    at = 0
    while at < len(body):
        if body[at] in _BETWEEN:
            at += 1
            continue
        try:
            value, at = json.JSONDecoder().raw_decode(body, at)
        except (ValueError, RecursionError):
            return None
        for each in value if isinstance(value, list) else [value]:
            if (call := _read_call(each)) is None:
                return None
            calls.append(call)
    return calls or None


def _read_call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = load_json(arguments)
    return ToolCall(value["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family writes calls: in blocks from `opening` to `closing`, or to the end of the answer if that is "".

    read           returns the calls of a block without its markers; None if it holds none
    syntax         of the calls that can be read while they are written; the others are read when their block ends
    argument       key of the arguments in a call that is one JSON object
    bare           whether a call may also be the whole answer, without `opening`
    frame          for an answer that must consist of calls
    visible        control tokens that count as text, by their spelling
    answer_header  text that the model writes before an answer to the user
    """

    name: str
    opening: str
    closing: str
    read: Callable[[str, Schemas], list[ToolCall] | None] = read_json_calls
    syntax: CallSyntax = JSON_CALLS
    argument: str = "arguments"
    bare: bool = False
    frame: Frame = Frame()
    visible: tuple[str, ...] = ()
    answer_header: tuple[str, ...] = ()

    @property
    def is_marked(self) -> bool:
        """Whether every call begins with `opening`, and nothing else does."""
        return not self.bare and not self.answer_header


class OpenCall:
    """A call whose arguments are being written. They are passed on as they are, except that control characters in
    strings, which JSON forbids, are escaped.
    """

    def __init__(self, index: int, name: str) -> None:
        self.start = CallStart(index, name)
        self._arguments = ""
        self._depth = 0
        self._is_inside = False  # of a string
        self._is_escaped = False  # the next character of the string

    def push(self, text: str) -> tuple[list[CallDelta | CallEnd], str]:
        """The parts that `text` adds, and the text behind the arguments, which is empty while they may go on."""
        delta, at, has_ended = "", 0, False
        while at < len(text) and not has_ended:
            if text[at] == "<" and not self._is_inside:  # no JSON: the markup behind arguments that were not closed
                has_ended = True
            else:
                delta += self._take(text[at])
                at, has_ended = at + 1, self._depth == 0
        self._arguments += delta
        parts: list[CallDelta | CallEnd] = [CallDelta(self.start.index, delta)] if delta else []
        if has_ended:
            parts.append(self.finish())
        return parts, text[at:]

    def finish(self) -> CallEnd:
        """The end of the call, wherever it is."""
        call = ToolCall(self.start.name, self._arguments)
        return CallEnd(self.start.index, call, is_cut=self._depth > 0 or not self._arguments)

    def _take(self, character: str) -> str:
        """Read a character; returns it as JSON has it."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_inside and character < " ":
            return f"\\u{ord(character):04x}"
        elif character == '"':
            self._is_inside = not self._is_inside
        elif self._is_inside:
            self._is_escaped = character == "\\"
        elif character in "{}[]":
            self._depth += 1 if character in "{[" else -1
        return character


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
        goes_on = True
        while goes_on:  # up to the next boundary
            if self._call is not None:
                goes_on = self._read_arguments(self._call, parts)
            else:
                goes_on = self._read_block(parts) if self._is_inside else self._read_text(parts)
        return parts

    def finish(self) -> list[AnswerPart]:
        """End the stream; returns the remaining parts."""
        if self._call is not None:
            return [self._call.finish()]
        if self._is_inside:
            return self._end_block(self._held, self._held if self._is_bare else self._format.opening + self._held)
        return [self._held] if self._held else []

    def _read_text(self, parts: list[AnswerPart]) -> bool:
        """Go on to the next block; False if more text is needed, as the others return it."""
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
        parts: list[AnswerPart] = []
        for i, call in enumerate(calls, first):
            parts += CallStart(i, call.name), CallDelta(i, call.arguments), CallEnd(i, call)
        return parts
