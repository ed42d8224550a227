"""Splits the text of an answer into text and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from edgespec.text.call_arguments import OpenCall, open_call
from edgespec.text.call_format import PYTHON_TAG, CallFormat, JsonArguments, loosen
from edgespec.text.call_values import read_tagged_value
from edgespec.text.tokenizer import find_unfinished
from edgespec.text.tool_calls import (
    NAME_CHARACTER,
    AnswerPart,
    CallDelta,
    CallEnd,
    CallStart,
    Schemas,
    ToolCall,
    load_json,
)

_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
_MEMBERS = rf'(?:"(?!(?:{"|".join(_NAME_KEYS + _ARGUMENT_KEYS)})")\w+"\s*:\s*"[^"\\]*"\s*,\s*)*'
_JSON_HEAD = (
    rf'[\s;,\[]*\{{\s*{_MEMBERS}"(?:{"|".join(_NAME_KEYS)})"\s*:\s*"(?P<name>[^"\\]+)"\s*,'
    rf'\s*{_MEMBERS}"(?:{"|".join(_ARGUMENT_KEYS)})"\s*:\s*(?=\{{)'
)
_JSON_REST = r'(?:\s*,\s*"\w+"\s*:\s*(?:"[^"\\]*"|[\w.+-]+))*\s*\}*[\s;,\]]*'


@dataclass(frozen=True)
class CallSyntax:
    """Regular expressions of the text around arguments; the groups `name` and, in some, `id` are those of the call.

    begun   the beginning of a block, behind the opening
    first   what stands between the opening and the arguments of a block's first call
    later   what stands between the arguments of one call and the arguments of the next
    ending  what belongs to the last call and the block, behind its arguments; it may be empty
    """

    begun: re.Pattern[str]
    first: re.Pattern[str]
    later: re.Pattern[str]
    ending: re.Pattern[str]


@lru_cache(64)
def make_syntax(call_format: CallFormat) -> CallSyntax:
    """The syntax of a format, in which blanks are optional.

    Calls that are JSON objects may have other members in any order, and either of the usual keys.
    """
    lead = (call_format.first.lstrip() + call_format.before).lstrip()
    opened = lead.removeprefix(call_format.opening)
    begun = re.compile(r"\s*(?:`{3}(?:json)?)?")
    if call_format.keys is not None:
        after = _loose(call_format.after.lstrip("} "))
        return CallSyntax(
            begun,
            re.compile(rf"\s*(?:`{{3}}(?:json)?)?{_JSON_HEAD}"),
            re.compile(rf"{_JSON_REST}{_JSON_HEAD}"),
            re.compile(rf"{_JSON_REST}\s*(?:`{{3}}\s*)?(?:{after})?\s*(?:{_loose(call_format.last)})?"),
        )
    name = rf"(?P<name>{NAME_CHARACTER}+?){_name_end(call_format)}"
    before = call_format.before.strip()
    marked = before.startswith(call_format.opening)
    again = before.removeprefix(call_format.opening) if marked else before
    mark = rf"(?:{re.escape(call_format.opening)})?" if marked and call_format.opening else ""
    after = rf"\s*(?:{_loose(call_format.after)})?[\s;,]*(?:{_loose(call_format.between or '')})?\s*"
    return CallSyntax(
        begun,
        re.compile(rf"\s*{loosen(opened, captures_id=True)}\s*{name}"),
        re.compile(rf"{after}{mark}\s*{loosen(again, captures_id=True)}\s*{name}"),
        re.compile(rf"\s*(?:{_loose(call_format.after)})?\s*(?:{_loose(call_format.last)})?"),
    )


def _loose(text: str) -> str:
    return loosen(text.strip())


def _name_end(call_format: CallFormat) -> str:
    """What stands between a name and its arguments. A name is complete if something else follows."""
    middle = call_format.middle.strip()
    if middle == "[ARGS]":  # some of Mistral's models write an id, which their templates do not
        return r"(?:\[CALL_ID\](?P<id>\w*))?\[ARGS\]\s*(?=\{)"
    end = r"\s*" + loosen(middle, captures_id=True) if middle else rf"(?!{NAME_CHARACTER})(?=[\s\S])"
    return end + (r"\s*(?=\{)" if isinstance(call_format.arguments, JsonArguments) else "")


class ToolCallReader:
    """Splits the text of an answer into text and calls. A block that holds no call stays text.

    JSON arguments are passed on while they are written, once the name and the beginning of the object have been read;
    they may turn out not to be valid JSON then. Arguments between tags are passed on one by one. Calls in another form
    than the model's own, with arguments before the name or inside a string, are read when their block ends.
    """

    def __init__(self, call_format: CallFormat, tools: Schemas) -> None:
        """Without an opening, an answer counts as a call only if it calls one of `tools`."""
        self._format = call_format
        self._opening = call_format.opening or PYTHON_TAG
        self._syntax = make_syntax(call_format)
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
            return self._end_block(self._held, self._held if self._is_bare else self._opening + self._held)
        return [self._held] if self._held else []

    def _read_text(self, parts: list[AnswerPart]) -> bool:
        """Go on to the next block; False if more text is needed, as the others return it."""
        if self._is_after_call:
            self._held = self._held.lstrip("\n")
            self._is_after_call = not self._held
        if self._is_start and not self._format.opening:
            stripped = self._held.lstrip()
            if not stripped:
                return False
            if stripped[0] in "{[":
                self._held, self._is_bare = stripped, True
                self._enter_block()
                return True
        before, found, rest = self._held.partition(self._opening)
        if found:
            self._add_text(before.rstrip("\n") if not before.strip() else before, parts)
            self._held = rest
            self._enter_block()
            return True
        certain = find_unfinished(self._held, (self._opening,))
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
        head = (self._syntax.later if self._n_calls > self._n_before else self._syntax.first).match(self._held)
        if head is not None and (not self._is_bare or head["name"] in self._tools):
            start = CallStart(self._n_calls, head["name"], head.groupdict().get("id") or "")
            self._call = open_call(start, self._format, self._tools.get(start.name, {}))
            self._n_calls += 1
            self._held = self._held[head.end() :]
            parts.append(start)
            return True
        if not self._format.closing or self._is_bare:
            return False
        begun = self._syntax.begun.match(self._held)  # some blocks begin with the mark that ends them
        if (at := self._held.find(self._format.closing, begun.end() if begun is not None else 0)) < 0:
            return False
        body, closing, rest = self._held[:at], self._format.closing, self._held[at + len(self._format.closing) :]
        parts += self._end_block(body + closing, self._opening + body + closing)
        self._held, self._is_inside, self._is_after_call = rest, False, True
        return True

    def _read_arguments(self, call: OpenCall, parts: list[AnswerPart]) -> bool:
        added, self._held, is_whole = call.push(self._held)
        parts += added
        if is_whole:
            self._call = None
        return is_whole

    def _end_block(self, body: str, verbatim: str) -> list[AnswerPart]:
        """The calls of a block that have not been read yet, or its text."""
        if self._n_calls > self._n_before:
            ending = self._syntax.ending.match(body)
            body = verbatim = body[ending.end() if ending else 0 :]
            if not body.removesuffix(self._format.closing).strip("]<>[ \n"):  # what may stand around MiniMax' tags
                return []
        calls = read_calls(body.removesuffix(self._format.closing), self._tools)
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


_HAS_ARGUMENTS = re.compile(r'"(arguments|parameters)"')
_BETWEEN = " \t\r\n;,]"  # calls in a row
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_WRAPPED = re.compile(r"(?:<tool_call>\s*)*(?:```(?:json)?\n(.*)```|(.*))", re.DOTALL)


def read_calls(body: str, tools: Schemas) -> list[ToolCall] | None:
    """The calls of a whole block in any of the usual forms; None if it holds none.

    Models that know several forms mix them up, open a block twice, or put a fence around JSON.
    """
    wrapped = _WRAPPED.fullmatch(body.strip())
    inner = next((each for each in wrapped.groups() if each is not None), body) if wrapped is not None else body
    return _read_json(inner) or _read_tags(inner, tools)


def _read_json(body: str) -> list[ToolCall] | None:
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
            if (call := _read_object(each)) is None:
                return None
            calls.append(call)
    return calls or None


def _read_object(value: Any) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    name = next((value[key] for key in _NAME_KEYS if value.get(key)), None)
    arguments: Any = next((value[key] for key in _ARGUMENT_KEYS if key in value), {})
    if isinstance(arguments, str):
        arguments = load_json(arguments)
    return ToolCall(name, json.dumps(arguments)) if isinstance(name, str) and isinstance(arguments, dict) else None


def _read_tags(body: str, tools: Schemas) -> list[ToolCall] | None:
    """Calls in Qwen3-Coder's tags; the tool's schema gives the types of the values."""
    calls = []
    for name, parameters in _FUNCTION.findall(body):
        declared = tools.get(name.strip(), {}).get("properties")
        schemas = declared if isinstance(declared, Mapping) else {}
        values = {
            key.strip(): read_tagged_value(text, schemas.get(key.strip()))
            for key, text in _PARAMETER.findall(parameters)
        }
        calls.append(ToolCall(name.strip(), json.dumps(values)))
    return calls or None
