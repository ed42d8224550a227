"""Generated tokens to text for people: decoded, split into reasoning and answer, ended at stop strings."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgespec.text.detokenize import StreamDecoder
from edgespec.text.reasoning import Channel, ReasoningFormat, ReasoningSplitter, Segment
from edgespec.text.stops import StopResult, StopStrings
from edgespec.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """Text to show: its channel, and who proposed its token: a round's `Decision.source`, '' for the target itself."""

    text: str
    channel: Channel
    origin: str


class _Origins:
    """Who proposed the characters of a text; read once, in order."""

    def __init__(self) -> None:
        self._runs: deque[tuple[int, str]] = deque()  # (position of its end, origin)
        self._end = 0

    def add(self, length: int, origin: str) -> None:
        self._end += length
        if length:
            self._runs.append((self._end, origin))

    def split(self, text: str, start: int) -> list[tuple[str, str]]:
        """`text`, which begins at position `start`, cut where the origin changes; forgets what lies before its end."""
        parts: list[tuple[str, str]] = []
        position, end = start, start + len(text)
        while position < end:
            run_end, origin = self._runs[0]
            stop = min(run_end, end)
            if stop > position:
                part = text[position - start : stop - start]
                if parts and parts[-1][1] == origin:
                    part = parts.pop()[0] + part
                parts.append((part, origin))
                position = stop
            if run_end <= end:
                self._runs.popleft()
        return parts


class TextStream:
    """The text of one reply, token by token.

    Stop strings (limits: see StopStrings) count in the answer only: reasoning is the model's own, and a stop string
    does not reach across a block of it. `prompt_tail` is the end of the rendered prompt, by which the stream knows
    whether the model begins inside its reasoning. A character belongs to the token that completed it, however long
    it is held back.
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
    ) -> None:
        """`is_raw`: the text is shown as it stands, markers of reasoning and all.

        `visible` are control tokens, by their spelling, that count as text. Where markers of reasoning are among them,
        all text is answer, whoever reads it tells its parts apart, and stop strings count in the same part of it.
        """
        visible = frozenset(visible)
        if is_raw and reasoning is not None:
            visible, reasoning = visible | reasoning.markers, None
        self._is_whole = reasoning is not None and bool(reasoning.markers & visible)
        self._text = ""  # from position `_routed` on, up to which it has been dealt with
        self._routed = 0
        shown = _control_tokens(tokenizer, (*visible, *(reasoning.markers if reasoning else ())))
        self._silent = tokenizer.end_of_generation
        self._decoder = StreamDecoder(tokenizer, shown)
        self._splitter = ReasoningSplitter(reasoning, reasoning is not None and reasoning.starts_inside(prompt_tail))
        self._stop_strings = tuple(stops)
        self._stops = StopStrings(self._stop_strings)
        self._decoded = _Origins()  # of the text that enters the splitter
        self._answer = _Origins()  # of the text that enters the stop strings
        self._shown = 0  # characters of the answer released by the stop strings
        self._stop: str | None = None
        self._origin = ""  # of the latest token

    @property
    def channel(self) -> Channel:
        """Where the text is now."""
        return self._splitter.channel

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text; later tokens add nothing."""
        return self._stop is not None

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop

    def push(self, token: int, origin: str) -> list[Piece]:
        """The text that `token` makes certain, in order; end-of-generation tokens have none."""
        if token in self._silent:
            return []
        self._origin = origin
        return self._split(self._decoder.push(token))

    def finish(self) -> list[Piece]:
        """Ends the reply and releases what was held back."""
        pieces = self._split(self._decoder.finish())
        pieces += self._route(self._splitter.finish())
        return pieces + self._release(self._stops.finish())

    def _split(self, text: str) -> list[Piece]:
        self._decoded.add(len(text), self._origin)
        self._text += text
        return self._route(self._splitter.push(text))

    def _route(self, segments: Iterable[Segment]) -> list[Piece]:
        pieces: list[Piece] = []
        for segment in segments:
            pieces += self._between(segment.start)
            self._text = self._text[len(segment.text) :]
            self._routed += len(segment.text)
            if self.stopped:
                break
            parts = self._decoded.split(segment.text, segment.start)
            if segment.channel == "answer":
                for text, origin in parts:
                    self._answer.add(len(text), origin)
                pieces += self._release(self._stops.push(segment.text))
            else:
                pieces += self._past_stops("answer" if self._is_whole else segment.channel, parts)
        return pieces + self._between(self._splitter.decided)

    def _between(self, end: int) -> list[Piece]:
        """Markers and headers before position `end`: dropped, or text that no stop string is looked for in."""
        text, self._text = self._text[: end - self._routed], self._text[end - self._routed :]
        start, self._routed = self._routed, end
        if not text or not self._is_whole or self.stopped:
            return []
        return self._past_stops("answer", self._decoded.split(text, start))

    def _past_stops(self, channel: Channel, parts: Iterable[tuple[str, str]]) -> list[Piece]:
        pieces = self._release(self._stops.finish())
        if self.stopped:
            return pieces
        self._stops = StopStrings(self._stop_strings)
        return pieces + [Piece(text, channel, origin) for text, origin in parts]

    def _release(self, result: StopResult) -> list[Piece]:
        parts = self._answer.split(result.text, self._shown)
        self._shown += len(result.text)
        self._stop = result.stop
        return [Piece(text, "answer", origin) for text, origin in parts]


def _control_tokens(tokenizer: Tokenizer, markers: Iterable[str]) -> frozenset[int]:
    """The control tokens that spell the markers: without them the markers would not appear in the text."""
    tokens = {token for marker in markers for token in tokenizer.encode(marker, parse_special=True)}
    return frozenset(token for token in tokens if not tokenizer.piece(token))
