"""The structure of answers that are tool calls, as the model writes calls and as the tools' schemas demand."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgespec.answers.tools import Tool
from edgespec.engine.schema_adaptation import find_reference
from edgespec.engine.structure import (
    Either,
    Grammar,
    Maybe,
    Part,
    Structure,
    Until,
    arguments_part,
    call_part,
    json_part,
)
from edgespec.errors import InvalidRequest
from edgespec.text.call_format import ID, INDEX, KEY, NAME, CallFormat, LiteralArguments, TaggedArguments
from edgespec.text.call_values import allowed_types, json_type

_SIGNS = {INDEX: Grammar("start: /[0-9]{1,2}/"), ID: Grammar("start: /[A-Za-z0-9]{9}/")}
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_CONSTANTS: Mapping[str, tuple[object, ...]] = {"boolean": (True, False), "null": (None,)}
_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"


def build_call_structure(call_format: CallFormat, tools: Sequence[Tool], *, parallel_calls: bool = False) -> Structure:
    """An answer that is one call of one of `tools`, or several with `parallel_calls` if the format has several.

    Raises InvalidRequest.
    """
    if call_format.keys is not None and not call_format.opening:  # JSON without a mark, like an answer in JSON
        key = call_format.keys[1]
        between = _between(call_format, parallel_calls=parallel_calls)
        calls = [(call_part(tool.name, key, tool.parameters, is_strict=tool.is_strict),) for tool in tools]
        return Structure(tuple(calls), between=between)
    return _build(call_format, tools, parallel_calls=parallel_calls)


def _build(call_format: CallFormat, tools: Sequence[Tool], *, parallel_calls: bool) -> Structure:
    first, lead = call_format.leads
    alternatives = [
        (*_split(lead.replace(NAME, tool.name)), tool.name, *_write_arguments(call_format, tool)) for tool in tools
    ]
    between = _between(call_format, parallel_calls=parallel_calls)
    return Structure(tuple(alternatives), (first,), (call_format.last,), between)


def _between(call_format: CallFormat, *, parallel_calls: bool) -> tuple[str, ...] | None:
    return (call_format.between,) if parallel_calls and call_format.between is not None else None


def build_opened_calls(call_format: CallFormat, tools: Sequence[Tool], *, parallel_calls: bool) -> Structure:
    """What follows the opening of calls of `tools` among the text of an answer, in a format that marks them.

    `parallel_calls`: if the format puts several calls into one block, there may be several. Raises InvalidRequest.
    """
    opened = replace(call_format, address="")
    if opened.first.strip():
        opened = replace(opened, first=opened.first.lstrip().removeprefix(opened.opening))
    else:
        opened = replace(opened, before=opened.before.lstrip().removeprefix(opened.opening))
    return _build(opened, tools, parallel_calls=parallel_calls and call_format.in_blocks)


def _split(text: str) -> tuple[Part, ...]:
    """Split a text at its signs for ids and indices (see CallFormat), which become grammars."""
    return tuple(_SIGNS.get(piece, piece) for piece in re.split(f"([{ID}{INDEX}])", text) if piece)


def _write_arguments(call_format: CallFormat, tool: Tool) -> tuple[Part, ...]:
    """What follows the name of a call."""
    middle, after = _split(call_format.middle), _split(call_format.after)
    match call_format.arguments:
        case TaggedArguments() as tags:
            written = _Tagged(tool, tags).write()
            if not tool.parameters.get("properties"):
                return _split(tags.empty)
            return (*middle, *written, *after)
        case LiteralArguments() as literals:
            return (*middle, *_Literal(tool, literals).write(), *after)
    return (*middle, arguments_part(tool.parameters, is_strict=tool.is_strict), *after)


class _Properties:
    """The declared arguments of a tool; others are not written."""

    def __init__(self, tool: Tool) -> None:
        self._tool = tool
        self._root = dict(tool.parameters)
        declared, required = self._root.get("properties"), self._root.get("required")
        self._declared: Mapping[str, Any] = declared if isinstance(declared, Mapping) else {}
        self._required = frozenset(required if isinstance(required, list) else ())
        if tool.is_strict and any(key in self._root for key in ("allOf", "anyOf", "oneOf", "not", "if", "$ref")):
            raise InvalidRequest(
                f"strict is true, but the arguments of '{tool.name}' do not stand in its properties alone.",
                hint="Remove strict, or list them under properties.",
            )

    def _resolve(self, schema: Any) -> dict[str, Any]:
        """Follow the references of a value's schema, up to eight of them. {} if that leads to no object."""
        for _ in range(8):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = find_reference(self._root, schema["$ref"]) or {}
        return schema if isinstance(schema, dict) else {}

    def _rooted(self, schema: Any, kind: str | None = None) -> dict[str, Any]:
        """`schema` with the tool's definitions, so that it can be compiled alone. If it states types, `kind` replaces
        them.
        """
        definitions = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return {**definitions, **schema, **({"type": kind} if kind is not None and "type" in schema else {})}

    def _choices(self, schema: Mapping[str, Any]) -> list[Any] | None:
        """The values that a schema lists."""
        if "const" in schema:
            return [schema["const"]]
        return [*schema["enum"]] if isinstance(schema.get("enum"), list) else None


class _Tagged(_Properties):
    """Arguments between tags, in the order of the schema."""

    def __init__(self, tool: Tool, tags: TaggedArguments) -> None:
        super().__init__(tool)
        self._tags = tags

    def write(self) -> tuple[Part, ...]:
        parts: list[Part] = []
        for key, schema in self._declared.items():
            argument = (self._tags.key + key, self._write_value(key, self._resolve(schema)), self._tags.between)
            parts += argument if key in self._required else [Maybe(argument)]
        return tuple(parts)

    def _write_value(self, key: str, schema: dict[str, Any]) -> Part:
        """The text behind a key, with the tag that ends its value."""
        tags, end = self._tags, self._tags.end.replace(KEY, key)
        if (choices := self._choices(schema)) is not None:
            return Either(tuple(self._write_constant(each, end) for each in choices))
        types = allowed_types(schema) or frozenset(("string",))
        alternatives: list[tuple[Part, ...]] = []
        if "string" in types:
            alternatives.append((tags.string, Until(end, _string_pattern(schema))))
        others = types if "string" not in types or tags.string != tags.other else frozenset[str]()
        for kind in _TYPES[1:]:
            if kind in others and kind in _CONSTANTS:
                alternatives += [self._write_constant(each, end) for each in _CONSTANTS[kind]]
            elif kind in others:
                value = json_part(self._rooted(schema, kind), is_strict=self._tool.is_strict)
                alternatives.append((tags.mark(kind), value, end))
        return Either(tuple(alternatives))

    def _write_constant(self, value: object, end: str) -> tuple[Part, ...]:
        """A value with the tag that ends it; some templates write names of values as Python does."""
        if isinstance(value, str):
            return self._tags.string, value, end
        written = json.dumps(value)
        either = Either(((written,), (repr(value),))) if value is None or isinstance(value, bool) else written
        return self._tags.mark(json_type(value)), either, end


def _string_pattern(schema: Mapping[str, Any]) -> str:
    """A regular expression for the text of a string. It follows the schema's pattern if that is anchored at both ends,
    else the limits of the length.
    """
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and pattern.startswith("^") and pattern.endswith("$"):
        return "(?:" + pattern[1:-1].replace("/", r"\/") + ")"
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if type(least) is int and (most == "" or type(most) is int) and (least or most != ""):
        return f"(?s:.{{{least},{most}}})"
    return "(?s:.*)"


class _Literal(_Properties):
    """Arguments as literals, in the order of the schema."""

    def __init__(self, tool: Tool, literals: LiteralArguments) -> None:
        super().__init__(tool)
        self._literals = literals

    def write(self) -> tuple[Part, ...]:
        return self._write_members(self._declared, self._required, quoted=False)

    def _write_members(
        self, declared: Mapping[str, Any], required: frozenset[str], *, quoted: bool
    ) -> tuple[Part, ...]:
        """Keys and values with commas in between: each member may be the first if those before it are optional."""
        members = [(key, self._member(key, schema, quoted=quoted)) for key, schema in declared.items()]
        starts: list[tuple[Part, ...]] = []
        for i, (key, member) in enumerate(members):
            rest: list[Part] = []
            for later, each in members[i + 1 :]:
                more = (self._literals.comma, *each)
                rest += more if later in required else [Maybe(more)]
            starts.append((*member, *rest))
            if key in required:
                return (Either(tuple(starts)),)
        return (Maybe((Either(tuple(starts)),)),) if starts else ()

    def _member(self, key: str, schema: Any, *, quoted: bool) -> tuple[Part, ...]:
        value = self._write_value(self._resolve(schema))
        if not quoted:
            return (key + self._literals.assign, *value)
        if len(self._literals.quote) > 1:
            return (f"{key}:", *value)
        return Either(((f"'{key}':",), (f'"{key}":',))), Maybe((" ",)), *value

    def _write_value(self, schema: dict[str, Any]) -> tuple[Part, ...]:
        if (choices := self._choices(schema)) is not None:
            return (Either(tuple((self._write_constant(each),) for each in choices)),)
        types = allowed_types(schema) or frozenset(("string", "number", "boolean"))
        alternatives = [self._write_type(kind, schema) for kind in _TYPES if kind in types]
        return (Either(tuple(alternatives)),)

    def _write_type(self, kind: str, schema: Mapping[str, Any]) -> tuple[Part, ...]:
        quote = self._literals.quote
        match kind:
            case "string" if len(quote) > 1:
                return quote, Until(quote, _string_pattern(schema))
            case "string":
                return (Grammar("start: /\"([^\"\\\\\\n]|\\\\.)*\"/ | /'([^'\\\\\\n]|\\\\.)*'/"),)
            case "integer":
                return (Grammar("start: /-?(?:0|[1-9][0-9]*)/"),)
            case "number":
                return (Grammar(f"start: /{_NUMBER}/"),)
            case "boolean" | "null":
                names = [(name,) for each in _CONSTANTS[kind] for name in (json.dumps(each), repr(each))]
                return (Either(tuple(names)),)
            case "array":
                item = self._write_value(self._resolve(schema.get("items") or {}))
                more: tuple[Part, ...] = ()
                for _ in range(_MAX_ITEMS - 1):
                    more = (Maybe((self._literals.comma, *item, *more)),)
                return "[", Maybe((*item, *more)), "]"
        declared, required = schema.get("properties"), schema.get("required")
        if not isinstance(declared, Mapping) and len(quote) == 1:
            return (json_part({"type": "object"}, is_strict=self._tool.is_strict),)
        known = declared if isinstance(declared, Mapping) else {}
        needed = frozenset(required if isinstance(required, list) else ())
        return "{", *self._write_members(known, needed, quoted=True), "}"

    def _write_constant(self, value: object) -> str:
        if isinstance(value, str):
            return self._literals.quote + value + self._literals.quote
        return json.dumps(value) if self._literals.assign == ":" else repr(value)


_MAX_ITEMS = 16  # of a list
