"""Chooses the reader of a model's answers."""

from __future__ import annotations

from edgespec.text.call_format import CallFormat
from edgespec.text.call_reader import ToolCallReader
from edgespec.text.functionary import FunctionaryReader
from edgespec.text.harmony import MARKERS, HarmonyReader
from edgespec.text.known_formats import FUNCTIONARY, HARMONY
from edgespec.text.tool_calls import Schemas

Reader = HarmonyReader | FunctionaryReader | ToolCallReader
"""Splits the text of an answer."""


def visible_texts(call_format: CallFormat) -> tuple[str, ...]:
    """The texts whose control tokens the reader has to see."""
    return MARKERS if call_format == HARMONY else call_format.visible


def make_reader(call_format: CallFormat, tools: Schemas) -> Reader:
    """The reader of answers that may call `tools`."""
    if call_format == HARMONY:
        return HarmonyReader()
    return FunctionaryReader(tools) if call_format == FUNCTIONARY else ToolCallReader(call_format, tools)
