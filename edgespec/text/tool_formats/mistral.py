"""Mistral: a JSON list of calls, or since 2025 NAME[ARGS]{...} for each call."""

from __future__ import annotations

import json
import re

from edgespec.text.tool_formats.base import (
    JSON_HEAD,
    JSON_REST,
    NAME_CHARACTER,
    CallSyntax,
    Frame,
    Schemas,
    ToolCall,
    ToolFormat,
    read_json_calls,
)

_MARKER = r"\s*(?:\[TOOL_CALLS\])?"
_NAME = rf"\s*({NAME_CHARACTER}+)(?:\[CALL_ID\]\w*)?\[ARGS\]"
_CALL = re.compile(_MARKER + _NAME)
_SYNTAX = CallSyntax(rf"{_MARKER}(?:{_NAME}\s*(?=\{{)|{JSON_HEAD})", JSON_REST)


def _read(body: str, tools: Schemas) -> list[ToolCall] | None:
    calls, at = list[ToolCall](), 0
    while match := _CALL.match(body, at):
        try:
            arguments, at = json.JSONDecoder().raw_decode(body, match.end())
        except (ValueError, RecursionError):
            return None
        if not isinstance(arguments, dict):
            return None
        calls.append(ToolCall(match[1], json.dumps(arguments)))
    return calls if calls and not body[at:].strip() else read_json_calls(body, tools)


MISTRAL_LIST = ToolFormat(
    "mistral",
    "[TOOL_CALLS]",
    "",
    _read,
    _SYNTAX,
    frame=Frame(first=("[TOOL_CALLS]", "["), last=("]",), between=(", ",)),
    visible=("[TOOL_CALLS]",),
)
MISTRAL_ARGS = ToolFormat(
    "mistral-args",
    "[TOOL_CALLS]",
    "",
    _read,
    _SYNTAX,
    frame=Frame(("[TOOL_CALLS]", "{name}", "[ARGS]"), between=()),
    visible=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
)
