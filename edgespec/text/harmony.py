"""Reads the messages of GPT-OSS, whose headers tell reasoning, answer and calls apart.

https://github.com/openai/harmony: <|start|>role<|channel|>name to=recipient <|constrain|>form<|message|>text<|end|>
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from edgespec.text.call_arguments import JsonCall
from edgespec.text.reasoning import HARMONY_MESSAGES, ReasoningSplitter, Segment
from edgespec.text.tool_calls import NAME_CHARACTER, AnswerPart, CallStart

_HARMONY_FUNCTION = re.compile(rf"\bto=functions\.({NAME_CHARACTER}+)")
MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reasoning."""

    text: str


class HarmonyReader:
    """Splits what a model writes after `<|start|>assistant`. A call whose text is not a JSON object stays text."""

    def __init__(self) -> None:
        self._splitter = ReasoningSplitter(HARMONY_MESSAGES, "header")
        self._header = ""
        self._function: str | None = None  # recipient of the present message, until its text begins
        self._call: JsonCall | None = None
        self._n_calls = 0

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
                    found = _HARMONY_FUNCTION.search(self._header)
                    self._header, self._function = "", found[1] if found else None
            elif self._function is not None or self._call is not None:
                parts += self._read_arguments(segment.text)
            else:
                parts.append(Thought(segment.text) if segment.channel == "reasoning" else segment.text)
        return parts

    def _read_arguments(self, text: str) -> list[AnswerPart | Thought]:
        """The parts that the text of a message with a recipient adds."""
        parts: list[AnswerPart | Thought] = []
        if self._function is not None:
            if not (text := text.lstrip()):
                return []
            if text.startswith("{"):
                self._call = JsonCall(CallStart(self._n_calls, self._function))
                self._n_calls += 1
                parts.append(self._call.start)
            self._function = None
        if self._call is not None:
            added, text, has_ended = self._call.push(text)
            parts += added
            if has_ended:
                self._call = None
                text = text.strip()
        return [*parts, text] if text else parts

    def _end_call(self) -> list[AnswerPart | Thought]:
        call, self._call, self._function = self._call, None, None
        return [call.finish()] if call is not None else []
