"""Llama 3: JSON after a control token, or as the whole answer; the arguments are called parameters."""

from __future__ import annotations

from edgespec.text.tool_formats.base import ToolFormat, read_json_calls

LLAMA3 = ToolFormat(
    "llama", "<|python_tag|>", "", read_json_calls, argument="parameters", bare=True, visible=("<|python_tag|>",)
)
