"""Qwen3-Coder: a tag for the function and one for each parameter; the values have no quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from edgespec.text.tool_formats.base import Schemas, ToolCall, ToolFormat, load_json, read_json_calls
from edgespec.text.tool_formats.hermes import HERMES

_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _read(body: str, tools: Schemas) -> list[ToolCall] | None:
    """The tool's schema gives the type of each parameter."""
    calls = []
    for name, parameters in _FUNCTION.findall(body):
        declared = tools.get(name.strip(), {}).get("properties")
        schemas = declared if isinstance(declared, Mapping) else {}
        values = {
            key.strip(): _read_value(text, schemas.get(key.strip())) for key, text in _PARAMETER.findall(parameters)
        }
        calls.append(ToolCall(name.strip(), json.dumps(values)))
    return calls or read_json_calls(body, tools)


def _read_value(text: str, schema: object) -> Any:
    """The text itself where the schema allows a string, even if it looks like JSON; otherwise the JSON value."""
    types = _allowed_types(schema)
    if "string" in types:
        return None if "null" in types and text.strip() == "null" else text
    value = load_json(text)
    return text if value is None and text.strip() != "null" else value


def _allowed_types(schema: object) -> frozenset[str]:
    """The types that a schema allows; references are not followed."""
    if not isinstance(schema, Mapping):
        return frozenset()
    stated = schema.get("type")
    names = [stated] if isinstance(stated, str) else stated if isinstance(stated, list) else []
    types = {each for each in names if isinstance(each, str)}
    if isinstance(schema.get("enum"), list) and any(isinstance(each, str) for each in schema["enum"]):
        types.add("string")
    for key in ("anyOf", "oneOf"):
        for each in schema[key] if isinstance(schema.get(key), list) else ():
            types |= _allowed_types(each)
    return frozenset(types)


QWEN_CODER = ToolFormat("xml", HERMES.opening, HERMES.closing, _read, frame=HERMES.frame, visible=HERMES.visible)
