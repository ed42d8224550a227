"""Writes calls as a model writes them, for templates that do not show them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.text.call_format import ID, INDEX, KEY, NAME, CallFormat, JsonArguments, LiteralArguments, TaggedArguments
from edgespec.text.call_values import json_type


def write_calls(call_format: CallFormat, calls: Sequence[Mapping[str, Any]]) -> str:
    """The text of `calls`, which have the form of OpenAI's chat interface with parsed arguments."""
    texts = [_write_call(call_format, call, i) for i, call in enumerate(calls)]
    return (
        call_format.leads[0]
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
    lead = call_format.leads[1].replace(NAME, name)
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
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return tags.key + key + tags.mark(json_type(value)) + text + tags.end.replace(KEY, key)
