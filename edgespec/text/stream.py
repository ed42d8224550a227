"""Generated tokens to text for people: decoded, split into reasoning and answer, ended at stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from edgespec.text.reasoning import Channel, ReasoningFormat, ReasoningSplitter, Segment
from edgespec.text.tokenizer import StopStrings, StreamDecoder, Tokenizer


class Piece(NamedTuple):
    """Text to show, its channel, and the drafter that proposed its token.

    `drafter` is the round's `Decision.drafter`, or '' if the target chose the token.
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
    def holds_stop(self) -> bool:
        """Whether a stop string may have begun, or has ended the text."""
        return self._stops.holds_text

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
