"""GPT-OSS' messages with their headers: reasoning, answer and calls are told apart by channel and recipient.

https://github.com/openai/harmony: <|start|>role<|channel|>name to=recipient <|constrain|>form<|message|>text<|end|>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgespec.text.stops import unfinished
from edgespec.text.toolcalls import NAME, Found, Frame, ToolFormat, call_of

_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(rf"\bto=functions\.({NAME}+)")
MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reasoning."""

    text: str


class HarmonyReader:
    """Splits what a model writes after `<|start|>assistant`. A call without proper arguments stays text."""

    def __init__(self) -> None:
        self._held = ""
        self._header: str | None = ""  # None within a message
        self._channel = ""
        self._function: str | None = None

    def push(self, text: str) -> list[Found | Thought]:
        """Adds `text`; returns what is certain."""
        self._held += text
        found: list[Found | Thought] = []
        while self._step(found):
            pass
        return found

    def finish(self) -> list[Found | Thought]:
        """The rest."""
        found: list[Found | Thought] = []
        if self._header is None:
            self._say(self._held, found, is_whole=True)
        return found

    def _step(self, found: list[Found | Thought]) -> bool:
        if self._header is not None:
            header, marker, rest = self._held.partition("<|message|>")
            if not marker:
                return False
            channel, function = _CHANNEL.search(header), _FUNCTION.search(header)
            self._channel = channel[1] if channel else "final"
            self._function = function[1] if function else None
            self._held, self._header = rest, None
            return True
        ends = [(at, marker) for marker in _ENDS if (at := self._held.find(marker)) >= 0]
        if ends:
            at, marker = min(ends)
            self._say(self._held[:at], found, is_whole=True)
            self._held, self._header = self._held[at + len(marker) :], ""
            return True
        if self._function is None:
            certain = unfinished(self._held, _ENDS)
            self._say(self._held[:certain], found, is_whole=False)
            self._held = self._held[certain:]
        return False

    def _say(self, text: str, found: list[Found | Thought], *, is_whole: bool) -> None:
        if not text:
            return
        if self._function is not None and is_whole:
            found.append(call_of(self._function, text) or text)
        else:
            found.append(Thought(text) if self._channel == "analysis" else text)


HARMONY = ToolFormat(
    "harmony",
    "<|channel|>",
    "",
    lambda body, tools: None,
    frame=Frame(("<|channel|>", "commentary to=functions.{name} ", "<|constrain|>", "json", "<|message|>")),
    visible=MARKERS,
)
FINAL = ("<|channel|>", "final", "<|message|>")
"""What is before an answer to the user."""
