"""Generated tokens to text for people: decoded, split into reasoning and answer, ended at stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from edgespec.text.tokenizer import StopStrings, StreamDecoder, Tokenizer, find_unfinished

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
    """One block at the beginning; later the markers are text, since an answer may quote them. Or blocks `anywhere`: the
    markers are control tokens, which an answer does not quote.
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
        if not self._state.markers and self._state.settled is None:  # of most models, for which this is called often
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


class Piece(NamedTuple):
    """Text to show, its channel, and the drafter that proposed its token.

    `drafter` is the round's `Decision.drafter`, or '' where the target chose the token.
    """

    text: str
    channel: Channel
    drafter: str


class TextStream:
    """The text of one reply, token by token.

    Stop strings (limits: see StopStrings) count in the answer only, not in the reasoning, and do not match across a
    block of reasoning. `prompt_tail` is the end of the rendered prompt; it shows whether the model begins inside its
    reasoning. Text that was held back, since a marker or a stop string may have begun, has the drafter of the token
    with which it is shown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        reasoning: ReasoningFormat | None = None,
        prompt_tail: str = "",
        visible: Iterable[str] = (),
        *,
        is_raw: bool = False,
        start: str = "",
    ) -> None:
        """`is_raw`: the text is shown unchanged, with its markers of reasoning. `start` is the reply so far, as the
        model writes it; it is not repeated, and no stop string counts in it.

        `visible` are control tokens, by their spelling, that count as text. If markers of reasoning are among them, all
        text is answer and the caller separates its parts; stop strings still count in the same part only.
        """
        visible = frozenset(visible)
        if is_raw and reasoning is not None:
            visible, reasoning = visible | reasoning.markers, None
        self._shows_markers = reasoning is not None and bool(reasoning.markers & visible)
        control = _control_tokens(tokenizer, (*visible, *(reasoning.markers if reasoning else ())))
        self._silent = tokenizer.end_of_generation
        self._decoder = StreamDecoder(tokenizer, control)
        starts_inside = reasoning is not None and reasoning.starts_inside(prompt_tail)
        self._splitter = ReasoningSplitter(
            reasoning, "reasoning" if starts_inside else reasoning.begin if reasoning else "answer"
        )
        self._splitter.push(start)
        self._splitter.finish()  # what may begin a marker there has been shown
        self._stop_strings = tuple(stops)
        self._stops = StopStrings(self._stop_strings)
        self._drafter = ""  # of the latest token

    @property
    def channel(self) -> Channel:
        return self._splitter.channel

    @property
    def holds_text(self) -> bool:
        """Whether a character or a marker of reasoning may have begun."""
        return self._decoder.holds_bytes or self._splitter.holds_text

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text; later tokens add nothing."""
        return self.stop is not None

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.stop

    def push(self, token: int, drafter: str) -> list[Piece]:
        """Add `token`; returns the text that is certain, in order. End-of-generation tokens have no text."""
        if token in self._silent:
            return []
        self._drafter = drafter
        return self._route(self._splitter.push(self._decoder.push(token)))

    def finish(self) -> list[Piece]:
        """End the reply; returns the text that was held back, without a character that is not complete."""
        return [*self._route(self._splitter.finish()), *self._piece("answer", self._stops.finish())]

    def _route(self, segments: Iterable[Segment]) -> list[Piece]:
        pieces: list[Piece] = []
        for segment in segments:
            if segment.channel == "answer":
                pieces += self._piece("answer", self._stops.push(segment.text))
                continue
            # No stop string counts in this text, and one that began before it cannot be completed after it.
            pieces += self._piece("answer", self._stops.finish())
            if self.stopped:
                break
            self._stops = StopStrings(self._stop_strings)
            channel: Channel | None = "answer" if self._shows_markers else segment.channel
            if channel is not None:
                pieces += self._piece(channel, segment.text)
        return pieces

    def _piece(self, channel: Channel, text: str) -> list[Piece]:
        return [Piece(text, channel, self._drafter)] if text else []


def _control_tokens(tokenizer: Tokenizer, markers: Iterable[str]) -> frozenset[int]:
    """The control tokens that spell the markers: without them the markers would not appear in the text."""
    tokens = {token for marker in markers for token in tokenizer.encode(marker, parse_special=True)}
    return frozenset(token for token in tokens if not tokenizer.piece(token))
