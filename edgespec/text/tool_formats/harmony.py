"""GPT-OSS: messages with headers, whose channel and recipient tell reasoning, answer and calls apart.

https://github.com/openai/harmony: <|start|>role<|channel|>name to=recipient <|constrain|>form<|message|>text<|end|>
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from edgespec.text.reasoning import HARMONY_MESSAGES, ReasoningSplitter, Segment
from edgespec.text.tool_formats.base import NAME_CHARACTER, AnswerPart, Frame, ToolFormat, make_call

_FUNCTION = re.compile(rf"\bto=functions\.({NAME_CHARACTER}+)")
MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reasoning."""

    text: str


class HarmonyReader:
    """Splits what a model writes after `<|start|>assistant`. A call without valid arguments stays text."""

    def __init__(self) -> None:
        self._splitter = ReasoningSplitter(HARMONY_MESSAGES, "header")
        self._header = ""
        self._function: str | None = None  # recipient of the present message
        self._arguments = ""

    def push(self, text: str) -> list[AnswerPart | Thought]:
        """Add `text`; returns the parts that are certain."""
        return self._read(self._splitter.push(text))

    def finish(self) -> list[AnswerPart | Thought]:
        """End the stream; returns the remaining parts."""
        return [*self._read(self._splitter.finish()), *self._end_call()]

    def _read(self, segments: Iterable[Segment]) -> list[AnswerPart | Thought]:
        parts: list[AnswerPart | Thought] = []
        for segment in segments:
            if segment.channel is None:
                parts += self._end_call()
                self._header += segment.text
                if segment.text == "<|message|>":
                    found = _FUNCTION.search(self._header)
                    self._header, self._function = "", found[1] if found else None
            elif self._function is not None:
                self._arguments += segment.text
            else:
                parts.append(Thought(segment.text) if segment.channel == "reasoning" else segment.text)
        return parts

    def _end_call(self) -> list[AnswerPart | Thought]:
        function, text = self._function, self._arguments
        self._function, self._arguments = None, ""
        return [make_call(function, text) or text] if function is not None and text else []


HARMONY = ToolFormat(
    HARMONY_MESSAGES.name,
    "<|channel|>",
    "",
    lambda body, tools: None,
    frame=Frame(("<|channel|>", "commentary to=functions.{name} ", "<|constrain|>", "json", "<|message|>")),
    visible=MARKERS,
    answer_header=("<|channel|>", "final", "<|message|>"),
)
