"""Tool calls in answers: which format a model writes, and the reader that splits its answers into text and calls."""

# ruff: noqa: RUF001 - DeepSeek writes its markers with wide bars

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Protocol

from edgespec.text.reasoning import detect_format
from edgespec.text.tool_formats.base import (
    NAME_CHARACTER,
    AnswerPart,
    CallDelta,
    CallEnd,
    CallStart,
    Frame,
    Schemas,
    ToolCall,
    ToolFormat,
)
from edgespec.text.tool_formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from edgespec.text.tool_formats.harmony import HARMONY, HarmonyReader, Thought
from edgespec.text.tool_formats.hermes import HERMES, tool_instructions
from edgespec.text.tool_formats.llama3 import LLAMA3
from edgespec.text.tool_formats.mistral import MISTRAL_ARGS, MISTRAL_LIST
from edgespec.text.tool_formats.qwen_coder import QWEN_CODER
from edgespec.text.tool_formats.reader import ToolCallReader

__all__ = [
    "NAME_CHARACTER",
    "AnswerPart",
    "CallDelta",
    "CallEnd",
    "CallStart",
    "Frame",
    "Reader",
    "Schemas",
    "Thought",
    "ToolCall",
    "ToolFormat",
    "detect_tool_format",
    "make_reader",
    "tool_instructions",
]

# The markers in a chat template -> the format its model writes; the first row that applies counts.
_FORMATS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_V3),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK_V31),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL_LIST),
    (("<tool_call>", "<function="), QWEN_CODER),
    (("<tool_call>",), HERMES),
    (("<|python_tag|>",), LLAMA3),
    (('"parameters"', "ipython"), LLAMA3),
)


class Reader(Protocol):
    """Splits the text of an answer."""

    def push(self, text: str) -> Iterable[AnswerPart | Thought]: ...

    def finish(self) -> Iterable[AnswerPart | Thought]: ...


@lru_cache(maxsize=16)
def detect_tool_format(template: str | None) -> ToolFormat:
    """The format a model writes, judged by its chat template; Hermes' where the template has no known marker."""
    source = template or ""
    reasoning = detect_format(source)
    if reasoning is not None and reasoning.name == HARMONY.name:
        return HARMONY
    return next((found for markers, found in _FORMATS if all(marker in source for marker in markers)), HERMES)


def make_reader(tool_format: ToolFormat, tools: Schemas) -> Reader:
    """The reader of answers in this format."""
    return HarmonyReader() if tool_format is HARMONY else ToolCallReader(tool_format, tools)
