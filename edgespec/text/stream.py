"""Generated tokens to text for people: decoded, split into reasoning and answer, ended at stop strings."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from edgespec.text.reasoning import Channel, ReasoningFormat, ReasoningSplitter, Segment
from edgespec.text.tokenizer import StopResult, StopStrings, StreamDecoder, Tokenizer


class Piece(NamedTuple):
    """Text to show, its channel, and the drafter that proposed its token.

    `origin` is the round's `Decision.source`, or '' where the target chose the token.
    """

    text: str
    channel: Channel
    origin: str


class _Origins:
    """The origins of a text's characters, consumed in order."""

    def __init__(self) -> None:
        self._runs: deque[tuple[int, str]] = deque()  # (characters, origin)

    def add(self, length: int, origin: str) -> None:
        if length:
            self._runs.append((length, origin))

    def take(self, text: str) -> list[tuple[str, str]]:
        """Consume `text`, the next characters; returns it cut where the origin changes."""
        parts: list[tuple[str, str]] = []
        while text:
            length, origin = self._runs.popleft()
            if length > len(text):
                self._runs.appendleft((length - len(text), origin))
            before = parts.pop()[0] if parts and parts[-1][1] == origin else ""
            parts.append((before + text[:length], origin))
            text = text[length:]
        return parts


class TextStream:
    """The text of one reply, token by token.

    Stop strings (limits: see StopStrings) count in the answer only, not in the reasoning, and do not match across a
    block of reasoning. `prompt_tail` is the end of the rendered prompt; it shows whether the model begins inside its
    reasoning. A character belongs to the token that completed it, even if it is held back for some tokens.
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
        self._splitter = ReasoningSplitter(reasoning, "reasoning" if starts_inside else "answer")
        self._splitter.push(start)
        self._splitter.finish()  # what may begin a marker there has been shown
        self._stop_strings = tuple(stops)
        self._stops = StopStrings(self._stop_strings)
        self._decoded = _Origins()  # of the text that enters the splitter
        self._answer = _Origins()  # of the text that enters the stop strings
        self._stop: str | None = None
        self._origin = ""  # of the latest token
        self._is_whole = reasoning is None and not stops  # nothing is split off or held back

    @property
    def channel(self) -> Channel:
        """The channel of the next text."""
        return self._splitter.channel

    @property
    def holds_text(self) -> bool:
        """Whether a character or a marker of reasoning may have begun."""
        return self._decoder.holds_bytes or self._splitter.holds_text

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text; later tokens add nothing."""
        return self._stop is not None

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop

    def push(self, token: int, origin: str) -> list[Piece]:
        """Add `token`; returns the text that is certain, in order. End-of-generation tokens have no text."""
        if token in self._silent:
            return []
        self._origin = origin
        return self._split(self._decoder.push(token))

    def finish(self) -> list[Piece]:
        """End the reply; returns the text that was held back."""
        pieces = self._split(self._decoder.finish())
        pieces += self._route(self._splitter.finish())
        return pieces + self._release(self._stops.finish())

    def _split(self, text: str) -> list[Piece]:
        if self._is_whole:
            return [Piece(text, "answer", self._origin)] if text else []
        self._decoded.add(len(text), self._origin)
        return self._route(self._splitter.push(text))

    def _route(self, segments: Iterable[Segment]) -> list[Piece]:
        pieces: list[Piece] = []
        for segment in segments:
            if self.stopped:
                break
            parts = self._decoded.take(segment.text)
            if segment.channel == "answer":
                for text, origin in parts:
                    self._answer.add(len(text), origin)
                pieces += self._release(self._stops.push(segment.text))
            elif self._shows_markers:
                pieces += self._bypass_stops("answer", parts)
            elif segment.channel is not None:
                pieces += self._bypass_stops(segment.channel, parts)
        return pieces

    def _bypass_stops(self, channel: Channel, parts: Iterable[tuple[str, str]]) -> list[Piece]:
        """Text in which no stop string counts; a stop string that began before it cannot be completed after it."""
        pieces = self._release(self._stops.finish())
        if self.stopped:
            return pieces
        self._stops = StopStrings(self._stop_strings)
        return pieces + [Piece(text, channel, origin) for text, origin in parts]

    def _release(self, result: StopResult) -> list[Piece]:
        self._stop = result.stop
        return [Piece(text, "answer", origin) for text, origin in self._answer.take(result.text)]


def _control_tokens(tokenizer: Tokenizer, markers: Iterable[str]) -> frozenset[int]:
    """The control tokens that spell the markers: without them the markers would not appear in the text."""
    tokens = {token for marker in markers for token in tokenizer.encode(marker, parse_special=True)}
    return frozenset(token for token in tokens if not tokenizer.piece(token))
