"""Tells a model's reasoning from its answer by the markers its chat template knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from edgespec.text.stops import unfinished

Channel = Literal["answer", "reasoning"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Text of one channel; `start` counts characters of the stream, markers included, before it."""

    channel: Channel
    text: str
    start: int


@dataclass(frozen=True, slots=True)
class State:
    """Where a stream may be: text goes to `channel` (None: dropped), and each marker leads to another state.

    `settled`: the state to enter once text that is not blank has appeared.
    """

    channel: Channel | None
    markers: Mapping[str, str]
    settled: str | None = None


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How one family of models marks reasoning: states by name, of which "answer" and "reasoning" always exist.

    A prompt that ends in one of `openers` (blanks aside) has begun the reasoning for the model.
    """

    name: str
    states: Mapping[str, State]
    openers: tuple[str, ...]

    @property
    def markers(self) -> frozenset[str]:
        """Every text that leads from one state to another."""
        return frozenset(marker for state in self.states.values() for marker in state.markers)

    def starts_inside(self, prompt_tail: str) -> bool:
        """Whether a model that continues `prompt_tail` begins with reasoning."""
        return prompt_tail.rstrip().endswith(self.openers)


def _block(name: str, opening: str, closing: str) -> ReasoningFormat:
    """A block at the beginning of the answer. Later on, the same words are text: an answer may speak about them."""
    states = {
        "answer": State("answer", {opening: "reasoning"}, settled="text"),
        "reasoning": State("reasoning", {closing: "answer"}),
        "text": State("answer", {}),
    }
    return ReasoningFormat(name, states, (opening.rstrip(),))


def _blocks(name: str, opening: str, closing: str) -> ReasoningFormat:
    """Blocks anywhere: the markers are tokens of their own that a model does not write about."""
    states = {
        "answer": State("answer", {opening: "reasoning"}),
        "reasoning": State("reasoning", {closing: "answer"}),
    }
    return ReasoningFormat(name, states, (opening.rstrip(),))


_ENDS = {"<|end|>": "answer", "<|return|>": "answer", "<|call|>": "answer"}

# https://github.com/openai/harmony: <|start|>role<|channel|>name<|message|>text<|end|>; analysis is the reasoning.
_HARMONY = ReasoningFormat(
    "harmony",
    {
        "answer": State("answer", {"<|start|>": "header", "<|channel|>": "channel", **_ENDS}),
        "reasoning": State("reasoning", {"<|start|>": "header", "<|channel|>": "channel", **_ENDS}),
        "header": State(None, {"<|channel|>": "channel", "<|message|>": "answer"}),
        "channel": State(
            None, {"analysis": "thinking", "final": "header", "commentary": "header", "<|message|>": "answer"}
        ),
        "thinking": State(None, {"<|channel|>": "channel", "<|message|>": "reasoning"}),
    },
    ("<|channel|>analysis<|message|>",),
)

_SOLAR = ReasoningFormat(
    "solar",
    {
        "answer": State("answer", {"<|think|>": "reasoning", "<|begin|>": "header", "<|content|>": "answer"}),
        "reasoning": State("reasoning", {"<|end|>": "answer"}),
        "header": State(None, {"<|think|>": "reasoning", "<|content|>": "answer"}),
    },
    ("<|think|>",),
)

# What a template must contain -> the format its model writes; the first that applies counts.
_KNOWN: tuple[tuple[tuple[str, ...], ReasoningFormat], ...] = (
    (("<|channel|>", "<|message|>", "analysis"), _HARMONY),
    (("<|channel>", "<channel|>"), _blocks("gemma", "<|channel>thought\n", "<channel|>")),
    (("<|think|>", "<|content|>"), _SOLAR),
    (("<|START_THINKING|>", "<|END_THINKING|>"), _blocks("cohere", "<|START_THINKING|>", "<|END_THINKING|>")),
    (("[THINK]", "[/THINK]"), _blocks("mistral", "[THINK]", "[/THINK]")),
    (("</seed:think>",), _block("seed", "<seed:think>", "</seed:think>")),
    (("</mm:think>",), _block("minimax", "<mm:think>", "</mm:think>")),
    (("</think>",), _block("think", "<think>", "</think>")),
    (("<think>",), _block("think", "<think>", "</think>")),
    (("</thinking>",), _block("thinking", "<thinking>", "</thinking>")),
    (("<thinking>",), _block("thinking", "<thinking>", "</thinking>")),
)


def detect_format(template_source: str) -> ReasoningFormat | None:
    """The format a model writes, judged by its chat template; None if the template knows no reasoning."""
    for needed, form in _KNOWN:
        if all(marker in template_source for marker in needed):
            return form
    return None


class ReasoningSplitter:
    """Splits a stream of text into segments of reasoning and answer; markers and message headers are dropped.

    Without a format everything is answer. The segments' joined texts do not depend on how the stream is cut.
    """

    def __init__(self, form: ReasoningFormat | None, starts_inside: bool) -> None:
        self._states = form.states if form else {"answer": State("answer", {})}
        self._state = self._states["reasoning" if form and starts_inside else "answer"]
        self._channel = self._state.channel or "answer"
        self._held = ""
        self._start = 0  # position of _held in the stream

    @property
    def channel(self) -> Channel:
        """Where text that came next would go; in a header, where the text before it went."""
        return self._channel

    @property
    def decided(self) -> int:
        """The position of the stream before which all is certain: text of a segment, or a marker or header."""
        return self._start

    def push(self, text: str) -> list[Segment]:
        """Adds `text`; returns what is certain, without an end that may become a marker."""
        self._held += text
        segments: list[Segment] = []
        while True:
            found = [(at, marker) for marker in self._state.markers if (at := self._held.find(marker)) >= 0]
            maybe = unfinished(self._held, self._state.markers)
            at, marker = min(found, default=(maybe, ""))
            settled = self._state.settled
            if settled is not None and self._held[:at].strip():
                self._state = self._states[settled]
                continue
            self._emit(at, segments)
            if not marker:
                return segments
            self._take(len(marker))
            self._state = self._states[self._state.markers[marker]]
            self._channel = self._state.channel or self._channel

    def finish(self) -> list[Segment]:
        """What was held back: the beginning of a marker that never came is text."""
        segments: list[Segment] = []
        self._emit(len(self._held), segments)
        return segments

    def _emit(self, length: int, segments: list[Segment]) -> None:
        start = self._start
        text = self._take(length)
        if text and self._state.channel is not None:
            segments.append(Segment(self._state.channel, text, start))

    def _take(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._start += length
        return text
