"""How the model at hand speaks: which reader splits its answers, and what has to be before and in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from edgespec.engine.structured_output import Structure, texts
from edgespec.server.tools import Tool
from edgespec.text.harmony import FINAL, HARMONY, HarmonyReader, Thought
from edgespec.text.reasoning import detect_format
from edgespec.text.toolcalls import Found, ToolCallReader, ToolFormat, format_of


class Reader(Protocol):
    """Splits the text of an answer."""

    def push(self, text: str) -> Iterable[Found | Thought]: ...

    def finish(self) -> Iterable[Found | Thought]: ...


def tool_format(template: str | None) -> ToolFormat:
    """How calls are written."""
    return HARMONY if _is_harmony(template) else format_of(template)


def reader_of(form: ToolFormat, tools: Sequence[Tool]) -> Reader:
    return HarmonyReader() if form is HARMONY else ToolCallReader(form, {tool.name: tool.parameters for tool in tools})


def answer_structure(structure: Structure, form: ToolFormat) -> Structure:
    """`structure` where the answer begins, behind the header of a message where the model writes one."""
    if form is not HARMONY:
        return structure
    return replace(structure, first=texts(FINAL))


def _is_harmony(template: str | None) -> bool:
    found = detect_format(template) if template else None
    return found is not None and found.name == "harmony"
