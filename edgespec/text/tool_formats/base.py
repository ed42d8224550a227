"""Tool calls, and how a family of models writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


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
    """Where the arguments of a call begin, for calls whose arguments are a JSON object that follows their name.

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
    read: Callable[[str, Schemas], list[ToolCall] | None]
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


def make_call(name: str, arguments: Any) -> ToolCall | None:
    """A call with `arguments`, an object or its JSON; None if they are anything else."""
    if isinstance(arguments, str):
        arguments = load_json(arguments)
    return ToolCall(name, json.dumps(arguments)) if isinstance(arguments, dict) else None


def load_json(text: str) -> Any:
    """The value of a JSON text; None for any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_json_calls(body: str, _: Schemas) -> list[ToolCall] | None:
    """The calls of one JSON object, a list of objects, or several in a row, separated by ';' or blanks."""
    decoder, at, calls = json.JSONDecoder(), 0, list[ToolCall]()
    while at < len(body):
        if body[at] in " \t\r\n;,]":
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(body, at)
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
    return make_call(value["name"], value.get("arguments", value.get("parameters", {})))
