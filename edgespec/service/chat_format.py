"""The reader of a model's answers, and the header that it writes before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgespec.engine.structured_output import Structure, texts
from edgespec.service.tools import Tool
from edgespec.text import tool_formats
from edgespec.text.tool_formats import Reader, ToolFormat


def make_reader(tool_format: ToolFormat, tools: Sequence[Tool]) -> Reader:
    """The reader that splits an answer into text, reasoning and calls of `tools`."""
    return tool_formats.make_reader(tool_format, {tool.name: tool.parameters for tool in tools})


def add_answer_header(structure: Structure, tool_format: ToolFormat) -> Structure:
    """`structure` after the header of the answer's message, if the model writes one (GPT-OSS)."""
    return replace(structure, first=texts(tool_format.answer_header)) if tool_format.answer_header else structure
