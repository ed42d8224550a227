"""Writes calls as a model writes them, for templates that do not show them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.text.call_format import (
    ID,
    INDEX,
    KEY,
    NAME,
    TYPE,
    CallFormat,
    JsonArguments,
    LiteralArguments,
    TaggedArguments,
)


def write_calls(call_format: CallFormat, calls: Sequence[Mapping[str, Any]]) -> str:
    """The text of `calls`, which have the form of OpenAI's chat interface with parsed arguments."""
    texts = [_write_call(call_format, call, i) for i, call in enumerate(calls)]
    return (
        call_format.first
        + ("\n" if call_format.between is None else call_format.between).join(texts)
        + call_format.last
    )


def _write_call(call_format: CallFormat, call: Mapping[str, Any], index: int) -> str:
    name: str = call["function"]["name"]
    arguments: Any = call["function"]["arguments"]
    if not isinstance(arguments, Mapping):
        arguments = {"input": arguments}
    empty = None
    match call_format.arguments:
        case JsonArguments():
            written = json.dumps(arguments, ensure_ascii=False)
        case LiteralArguments() as literals:
            members = (f"{key}{literals.assign}{_literal(value, literals)}" for key, value in arguments.items())
            written = literals.comma.join(members)
        case TaggedArguments() as tags:
            values = [_tagged(key, value, tags) for key, value in arguments.items()]
            written, empty = tags.between.join(values), None if values else tags.empty
    text = name + (call_format.middle + written + call_format.after if empty is None else empty)
    lead = (call_format.address + call_format.before).replace(NAME, name)
    return (lead + text).replace(INDEX, str(index)).replace(ID, str(call.get("id") or ""))


def _literal(value: object, literals: LiteralArguments) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace(literals.quote, "\\" + literals.quote).replace("\n", "\\n")
        return literals.quote + (escaped if len(literals.quote) == 1 else value) + literals.quote
    if isinstance(value, Mapping):
        key_quote = literals.quote if len(literals.quote) == 1 else ""
        members = (f"{key_quote}{key}{key_quote}:{_literal(each, literals)}" for key, each in value.items())
        return "{" + literals.comma.join(members) + "}"
    if isinstance(value, list):
        return "[" + literals.comma.join(_literal(each, literals) for each in value) + "]"
    return json.dumps(value) if literals.assign == ":" else repr(value)


def _tagged(key: str, value: object, tags: TaggedArguments) -> str:
    if isinstance(value, str):
        mark, text = tags.string, value
    else:
        mark, text = tags.other.replace(TYPE, _json_type(value)), json.dumps(value, ensure_ascii=False)
    return tags.key + key + mark + text + tags.end.replace(KEY, key)


def _json_type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case list():
            return "array"
    return "object"
