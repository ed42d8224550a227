"""Separates the reasoning of a model from its answer, by the markers of its family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from edgespec.text.tokenizer import find_unfinished

Channel = Literal["answer", "reasoning"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Text of one channel; the channel is None for a marker or a message header."""

    channel: Channel | None
    text: str


@dataclass(frozen=True, slots=True)
class State:
    """A state of the stream: its text goes to `channel` (None: a header), and each marker leads to another state.

    `settled` is the state to enter after text that is not blank.
    """

    channel: Channel | None
    markers: Mapping[str, str]
    settled: str | None = None


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How one family of models marks reasoning: states by name, with at least "answer" and "reasoning".

    A prompt that ends in one of `openers`, apart from blanks, has begun the reasoning for the model. The model writes
    its reasoning between `before` and `after`, and `header` in front of an answer without reasoning.
    """

    name: str
    states: Mapping[str, State]
    openers: tuple[str, ...]
    before: str
    after: str
    header: str = ""

    @property
    def begin(self) -> str:
        """The state at the beginning of an answer."""
        return "start" if "start" in self.states else "answer"

    @property
    def markers(self) -> frozenset[str]:
        """Every text that leads from one state to another."""
        return frozenset(marker for state in self.states.values() for marker in state.markers)

    def starts_inside(self, prompt_tail: str) -> bool:
        """Whether a model that continues `prompt_tail` begins with reasoning."""
        return prompt_tail.rstrip().endswith(self.openers)

    def write(self, reasoning: str, text: str, *, is_inside: bool) -> str:
        """An answer as the model writes it, up to its end or, without `text`, inside of the reasoning.

        `is_inside`: the prompt has begun the reasoning.
        """
        if not reasoning and not is_inside:
            return self.header + text if text else ""
        thought = reasoning if is_inside else self.before + reasoning
        return thought + self.after + text if text else thought


def make_block(name: str, opening: str, closing: str, *, anywhere: bool = False) -> ReasoningFormat:
    """The format of a model that reasons between two markers. The block stands at the beginning, and later markers are
    text, since an answer may quote them. With `anywhere` there may be several blocks: the markers are control tokens,
    which an answer does not quote.
    """
    states = {
        "answer": State("answer", {opening: "reasoning"}, settled=None if anywhere else "text"),
        "reasoning": State("reasoning", {closing: "answer"}),
        "text": State("answer", {}),
    }
    return ReasoningFormat(name, states, (opening.rstrip(),), opening, closing)


_ENDS = {"<|end|>": "answer", "<|return|>": "answer", "<|call|>": "answer"}
# https://github.com/openai/harmony: <|start|>role<|channel|>name<|message|>text<|end|>; analysis is the reasoning.
HARMONY_MESSAGES = ReasoningFormat(
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
    before="<|channel|>analysis<|message|>",
    after="<|end|><|start|>assistant<|channel|>final<|message|>",
    header="<|channel|>final<|message|>",
)
_SOLAR = ReasoningFormat(
    "solar",
    {
        "answer": State("answer", {"<|think|>": "reasoning", "<|begin|>": "header", "<|content|>": "answer"}),
        "reasoning": State("reasoning", {"<|end|>": "answer"}),
        "header": State(None, {"<|think|>": "reasoning", "<|content|>": "answer"}),
    },
    ("<|think|>",),
    before="<|think|>",
    after="<|end|><|begin|>assistant<|content|>",
    header="<|content|>",
)
# Kimi K3 puts reasoning and answer into elements, and calls into another one, which a reader reads.
_KIMI = ReasoningFormat(
    "kimi",
    {
        "answer": State(
            "answer",
            {
                "<|open|>think<|sep|>": "reasoning",
                "<|open|>response<|sep|>": "answer",
                "<|close|>response<|sep|>": "answer",
            },
        ),
        "reasoning": State("reasoning", {"<|close|>think<|sep|>": "answer"}),
    },
    ("<|open|>think<|sep|>",),
    before="<|open|>think<|sep|>",
    after="<|close|>think<|sep|><|open|>response<|sep|>",
    header="<|open|>response<|sep|>",
)
# Muse Glimmer's messages name their recipients: the model itself, the user or a tool.
_MUSE = ReasoningFormat(
    "muse",
    {
        "start": State(None, {"to=self<|message|>": "reasoning", "<|message|>": "answer"}),
        "answer": State("answer", {"<|eom|>": "start"}),
        "reasoning": State("reasoning", {"<|eom|>": "start"}),
    },
    ("to=self<|message|>",),
    before=" to=self<|message|>",
    after="<|eom|><|start|>assistant to=user<|message|>",
    header=" to=user<|message|>",
)
# Functionary 3.2 names the user in the first line of an answer.
_FUNCTIONARY = ReasoningFormat(
    "functionary",
    {
        "start": State(None, {"all\n": "answer"}, settled="answer"),
        "answer": State("answer", {}),
        "reasoning": State("reasoning", {}),
    },
    (),
    before="",
    after="",
    header="all\n",
)
# The markers in a chat template -> the format its model writes; the first row that applies counts.
_FORMATS: tuple[tuple[tuple[str, ...], ReasoningFormat], ...] = (
    (("<|channel|>", "<|message|>", "analysis"), HARMONY_MESSAGES),
    (("<|channel>", "<channel|>"), make_block("gemma", "<|channel>thought\n", "<channel|>", anywhere=True)),
    (("<|think|>", "<|content|>"), _SOLAR),
    (("<|open|>think<|sep|>",), _KIMI),
    (("to=self", "<|eom|>"), _MUSE),
    ((">>>all",), _FUNCTIONARY),
    (
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        make_block("cohere", "<|START_THINKING|>", "<|END_THINKING|>", anywhere=True),
    ),
    (("[BEGIN FINAL RESPONSE]",), make_block("apriel", "Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]")),
    (("[THINK]", "[/THINK]"), make_block("mistral", "[THINK]", "[/THINK]", anywhere=True)),
    (("</seed:think>",), make_block("seed", "<seed:think>", "</seed:think>")),
    (("</mm:think>",), make_block("minimax", "<mm:think>", "</mm:think>")),
    (("</think>",), make_block("think", "<think>", "</think>")),
    (("<think>",), make_block("think", "<think>", "</think>")),
    (("</thinking>",), make_block("thinking", "<thinking>", "</thinking>")),
    (("<thinking>",), make_block("thinking", "<thinking>", "</thinking>")),
)


@lru_cache(maxsize=16)
def detect_format(text: str) -> ReasoningFormat | None:
    """The format whose markers are in what a chat template renders, or in its source; None if none are."""
    return next((found for markers, found in _FORMATS if all(each in text for each in markers)), None)


class ReasoningSplitter:
    """Splits a stream of text into segments of reasoning, of answer, and of markers and message headers.

    Without a format everything is answer. The segments' texts, joined, are the stream; the text of each channel does
    not depend on how the stream is cut.
    """

    def __init__(self, reasoning_format: ReasoningFormat | None, state: str = "answer") -> None:
        """`state` names the state at the beginning; without a format there is one state only."""
        self._states = reasoning_format.states if reasoning_format else {"answer": State("answer", {})}
        self._state = self._states[state if reasoning_format else "answer"]
        self.channel: Channel = self._state.channel or "answer"  # of the next text; in a header, of the text before it
        self._held = ""

    @property
    def holds_text(self) -> bool:
        """Whether the text ends in what may become a marker."""
        return bool(self._held)

    def push(self, text: str) -> list[Segment]:
        """Add `text`; returns the segments that are certain. An end that may become a marker is held back."""
        if not self._state.markers and self._state.settled is None:  # of most answers, at every token
            return [Segment(self._state.channel, text)] if text else []
        self._held += text
        segments: list[Segment] = []
        while True:
            found = [(at, marker) for marker in self._state.markers if (at := self._held.find(marker)) >= 0]
            maybe = find_unfinished(self._held, self._state.markers)
            at, marker = min(found, default=(maybe, ""))
            settled = self._state.settled
            if settled is not None and self._held[:at].strip():
                self._state = self._states[settled]
                continue
            segments += self._take(at, self._state.channel)
            if not marker:
                return segments
            segments += self._take(len(marker), None)
            self._state = self._states[self._state.markers[marker]]
            self.channel = self._state.channel or self.channel

    def finish(self) -> list[Segment]:
        """End the stream; the beginning of a marker that was held back is text."""
        return self._take(len(self._held), self._state.channel)

    def _take(self, length: int, channel: Channel | None) -> list[Segment]:
        text, self._held = self._held[:length], self._held[length:]
        return [Segment(channel, text)] if text else []
