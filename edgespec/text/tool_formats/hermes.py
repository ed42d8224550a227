"""Hermes and Qwen: one JSON object with name and arguments between tags."""

from __future__ import annotations

import json
from typing import Any

from edgespec.text.tool_formats.base import Frame, ToolFormat, read_json_calls

HERMES = ToolFormat(
    "hermes",
    "<tool_call>",
    "</tool_call>",
    read_json_calls,
    frame=Frame(("<tool_call>", "\n"), ("\n", "</tool_call>"), between=("\n",)),
    visible=("<tool_call>", "</tool_call>"),
)


def tool_instructions(tools: list[dict[str, Any]]) -> str:
    """A system text that describes `tools` to a model whose chat template does not; calls are in Hermes' format."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call functions. Their signatures, one JSON object a line:\n<tools>\n"
        f"{listed}\n</tools>\n"
        "To call one, write a JSON object with its name and arguments between tags:\n"
        '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'
    )
