"""Calls of tools in an answer: how families of models write them, read back as they come."""

# ruff: noqa: RUF001 - DeepSeek writes its markers with wide bars

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.text.stops import unfinished


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is a JSON object as text."""

    name: str
    arguments: str


Found = str | ToolCall
NAME = "[A-Za-z0-9_.:/-]"
"""A character of a tool's name."""
Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's arguments, by the tool's name."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What is around the JSON of calls in an answer that has to be calls.

    before, after  of each call; "{name}" is the tool's name, and the JSON is the arguments alone where it appears
    first, last    of all of them
    between        of one call and the next; None where an answer holds one call
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    between: tuple[str, ...] | None = None

    @property
    def holds_name(self) -> bool:
        return any("{name}" in part for part in self.before)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family writes calls: blocks from `opening` to `closing`, or to the end of the answer where that is "".

    bare      a call may also be the whole answer, without `opening`
    read      the calls of a block without its markers; None if it holds none
    argument  the key of the arguments in a call that is one JSON object
    frame     of answers that have to be calls
    """

    name: str
    opening: str
    closing: str
    read: Callable[[str, Schemas], list[ToolCall] | None]
    argument: str = "arguments"
    bare: bool = False
    frame: Frame = Frame()
    visible: tuple[str, ...] = ()


def format_of(template: str | None) -> ToolFormat:
    """What a model writes, judged by its chat template; Hermes' form where that does not tell.

    GPT-OSS' form is apart, in text/harmony.py.
    """
    source = template or ""
    for markers, form in _KNOWN:
        if all(marker in source for marker in markers):
            return form
    return HERMES


def instructions(tools: list[dict[str, Any]]) -> str:
    """What a model is told of tools whose chat template does not know them, in Hermes' form."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call functions. Their signatures, one JSON object a line:\n<tools>\n"
        f"{listed}\n</tools>\n"
        "To call one, write a JSON object with its name and arguments between tags:\n"
        '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'
    )


class ToolCallReader:
    """Splits the text of an answer into text and calls. What looks like a call and is none stays text."""

    def __init__(self, form: ToolFormat, tools: Schemas) -> None:
        """JSON that is the whole answer is a call only if it calls one of `tools`."""
        self._form = form
        self._tools = tools
        self._held = ""
        self._is_inside = False
        self._is_start = True  # nothing but blanks so far
        self._is_bare = False
        self._is_after_call = False  # blank lines there are no text

    def push(self, text: str) -> list[Found]:
        """Adds `text`; returns what is certain."""
        self._held += text
        found: list[Found] = []
        while self._step(found):
            pass
        return found

    def finish(self) -> list[Found]:
        """The rest."""
        if self._is_inside and (not self._form.closing or self._is_bare):
            return self._block(self._held, self._held if self._is_bare else self._form.opening + self._held)
        rest = (self._form.opening if self._is_inside else "") + self._held
        return [rest] if rest else []

    def _step(self, found: list[Found]) -> bool:
        form = self._form
        if self._is_inside:
            if not form.closing or self._is_bare:
                return False
            body, closing, rest = self._held.partition(form.closing)
            if not closing:
                return False
            found += self._block(body, form.opening + body + closing)
            self._held, self._is_inside, self._is_after_call = rest, False, True
            return True
        if self._is_after_call:
            self._held = self._held.lstrip("\n")
            self._is_after_call = not self._held
        stripped = self._held.lstrip()
        if form.bare and self._is_start and stripped.startswith("{"):
            self._held, self._is_inside, self._is_bare = stripped, True, True
            return True
        if form.bare and self._is_start and not stripped:
            return False
        before, opening, rest = self._held.partition(form.opening)
        if opening:
            self._say(before.rstrip("\n") if not before.strip() else before, found)
            self._held, self._is_inside = rest, True
            return True
        certain = unfinished(self._held, (form.opening,))
        self._say(self._held[:certain], found)
        self._held = self._held[certain:]
        return False

    def _say(self, text: str, found: list[Found]) -> None:
        if text:
            found.append(text)
            self._is_start = self._is_start and not text.strip()

    def _block(self, body: str, verbatim: str) -> list[Found]:
        calls = self._form.read(body, self._tools)
        if calls and self._is_bare:
            is_meant = all(call.name in self._tools for call in calls) and _HAS_KEY.search(body)
            calls = calls if is_meant else None
        return [*calls] if calls else [verbatim]


_HAS_KEY = re.compile(r'"(arguments|parameters)"')


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    return call_of(value["name"], value.get("arguments", value.get("parameters", {})))


def call_of(name: str, arguments: Any) -> ToolCall | None:
    """A call with `arguments`, an object or its JSON; None if they are anything else."""
    if isinstance(arguments, str):
        arguments = _loaded(arguments)
    return ToolCall(name, json.dumps(arguments)) if isinstance(arguments, dict) else None


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_json(body: str, _: Schemas) -> list[ToolCall] | None:
    """One object, a list of them, or several one after the other, separated by ';' or blanks."""
    decoder, at, calls = json.JSONDecoder(), 0, list[ToolCall]()
    while at < len(body):
        if body[at] in " \t\r\n;,":
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            return None
        for each in value if isinstance(value, list) else [value]:
            if (call := _call(each)) is None:
                return None
            calls.append(call)
    return calls or None


_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _read_xml(body: str, tools: Schemas) -> list[ToolCall] | None:
    """Qwen3-Coder's: a tag for the function and one for each parameter, whose type the tool's schema tells."""
    calls = []
    for name, inside in _FUNCTION.findall(body):
        declared = tools.get(name.strip(), {}).get("properties")
        schemas = declared if isinstance(declared, Mapping) else {}
        values = {key.strip(): _value(text, schemas.get(key.strip())) for key, text in _PARAMETER.findall(inside)}
        calls.append(ToolCall(name.strip(), json.dumps(values)))
    return calls or _read_json(body, tools)


def _value(text: str, schema: object) -> Any:
    """What may be a string is one, however much it looks like JSON; of anything else, what is JSON is taken as such."""
    types = _types(schema)
    if "string" in types:
        return None if "null" in types and text.strip() == "null" else text
    loaded = _loaded(text)
    return text if loaded is None and text.strip() != "null" else loaded


def _types(schema: object) -> frozenset[str]:
    """The types that a schema allows, as far as it says so without references."""
    if not isinstance(schema, Mapping):
        return frozenset()
    given = schema.get("type")
    named = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    found = {each for each in named if isinstance(each, str)}
    if isinstance(schema.get("enum"), list) and any(isinstance(each, str) for each in schema["enum"]):
        found.add("string")
    for key in ("anyOf", "oneOf"):
        for each in schema[key] if isinstance(schema.get(key), list) else ():
            found |= _types(each)
    return frozenset(found)


_MISTRAL = re.compile(rf"\s*(?:\[TOOL_CALLS\])?\s*({NAME}+)(?:\[CALL_ID\]\w*)?\[ARGS\]")


def _read_mistral(body: str, tools: Schemas) -> list[ToolCall] | None:
    """A list of objects, or since 2025 NAME[ARGS]{...} for each call."""
    calls, at = list[ToolCall](), 0
    while match := _MISTRAL.match(body, at):
        try:
            arguments, at = json.JSONDecoder().raw_decode(body, match.end())
        except (ValueError, RecursionError):
            return None
        if not isinstance(arguments, dict):
            return None
        calls.append(ToolCall(match[1], json.dumps(arguments)))
    return calls if calls and not body[at:].strip() else _read_json(body, tools)


_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)", re.DOTALL)


def _read_deepseek(body: str, _: Schemas) -> list[ToolCall] | None:
    """Since V3.1 NAME and arguments around the separator; before, 'function', NAME and a fenced block of JSON."""
    calls = []
    for before, after in _DEEPSEEK.findall(body):
        name = before.strip()
        if name == "function" and "\n" in after:
            name, after = after.split("\n", 1)
        call = call_of(name.strip(), after.strip().removeprefix("```json").removesuffix("```").strip())
        if call is None:
            return None
        calls.append(call)
    return calls or None


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", _read_json,
                    frame=Frame(("<tool_call>", "\n"), ("\n", "</tool_call>"), between=("\n",)),
                    visible=("<tool_call>", "</tool_call>"))  # fmt: skip
_XML = ToolFormat("xml", "<tool_call>", "</tool_call>", _read_xml, frame=HERMES.frame, visible=HERMES.visible)
_LLAMA = ToolFormat("llama", "<|python_tag|>", "", _read_json, "parameters", True, visible=("<|python_tag|>",))
_MISTRAL_LIST = ToolFormat("mistral", "[TOOL_CALLS]", "", _read_mistral,
                           frame=Frame(first=("[TOOL_CALLS]", "["), last=("]",), between=(", ",)),
                           visible=("[TOOL_CALLS]",))  # fmt: skip
_MISTRAL_ARGS = ToolFormat("mistral-args", "[TOOL_CALLS]", "", _read_mistral,
                           frame=Frame(("[TOOL_CALLS]", "{name}", "[ARGS]"), between=()),
                           visible=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"))  # fmt: skip
_DEEP = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_DEEPSEEK_OLD = ToolFormat("deepseek", _DEEP[0], _DEEP[4], _read_deepseek, visible=_DEEP,
                           frame=Frame((_DEEP[1], "function", _DEEP[2], "{name}", "\n```json\n"), ("\n```", _DEEP[3]),
                                       _DEEP[:1], _DEEP[4:], ("\n",)))  # fmt: skip
_DEEPSEEK_NEW = ToolFormat("deepseek-v3.1", _DEEP[0], _DEEP[4], _read_deepseek, visible=_DEEP,
                           frame=Frame((_DEEP[1], "{name}", _DEEP[2]), (_DEEP[3],), _DEEP[:1], _DEEP[4:], ())
                           )  # fmt: skip

# What a template must contain -> the form its model writes; the first that applies counts.
_KNOWN: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<｜tool▁calls▁begin｜>", "```json"), _DEEPSEEK_OLD),
    (("<｜tool▁calls▁begin｜>",), _DEEPSEEK_NEW),
    (("[TOOL_CALLS]", "[ARGS]"), _MISTRAL_ARGS),
    (("[TOOL_CALLS]",), _MISTRAL_LIST),
    (("<tool_call>", "<function="), _XML),
    (("<tool_call>",), HERMES),
    (("<|python_tag|>",), _LLAMA),
    (('"parameters"', "ipython"), _LLAMA),
)
