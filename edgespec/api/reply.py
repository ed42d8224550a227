"""Replies: the whole one, and the streams of text that lead to it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from edgespec.core.metrics import Metrics
from edgespec.core.protocols import FinishReason
from edgespec.engine.events import Event, Finished, Notice
from edgespec.errors import InvalidRequest
from edgespec.service.response import ReasoningDelta, ResponseStream, TextDelta
from edgespec.service.stream import Stream
from edgespec.service.tools import format_call
from edgespec.text.reasoning import Channel
from edgespec.text.stream import Piece
from edgespec.text.tool_formats import CallEnd, ToolCall

_LOG = logging.getLogger("edgespec")


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished generation. `str(reply)` is its text.

    text           the answer, without reasoning and calls of tools
    reasoning      what a reasoning model wrote before it
    tool_calls     the calls that the answer makes; their arguments are JSON as text, which may be cut by 'length'
    finish_reason  'stop' (end of text or a stop text), 'length', or 'cancelled'
    stop           the stop text that ended the answer, if one did
    tokens         ids of all emitted tokens
    seed           the seed in use; pass it as `seed` to reproduce the answer
    stats          tokens per second, acceptance rate, tau, ratio to plain decoding, and times
    """

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    stop: str | None
    tokens: tuple[int, ...]
    seed: int
    stats: Metrics

    def __str__(self) -> str:
        return self.text

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message for the next call of `chat`. Calls are numbered: their ids are call_0, call_1, ..."""
        calls = [format_call(f"call_{i}", call.name, call.arguments) for i, call in enumerate(self.tool_calls)]
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {
            "role": "assistant",
            "content": self.text,
            **reasoning,
            **({"tool_calls": calls} if calls else {}),
        }


class ReplyBuilder:
    """Collects the events of one generation; `finished` is called with the reply."""

    def __init__(self, response: ResponseStream, finished: Callable[[Reply], None]) -> None:
        self.reply: Reply | None = None
        self._response = response
        self._finished = finished
        self._pieces: list[Piece] = []
        self._calls: list[ToolCall] = []
        self._origin = ""  # of the latest piece; a reader may have held back its text

    def add(self, event: Event) -> Iterator[Piece]:
        """The text that `event` adds."""
        if isinstance(event, Piece):
            self._origin = event.origin
        elif isinstance(event, Notice):
            _LOG.warning(event.text)
        for part in self._response.parts(event):
            if isinstance(part, TextDelta | ReasoningDelta):
                channel: Channel = "answer" if isinstance(part, TextDelta) else "reasoning"
                piece = Piece(part.text, channel, self._origin)
                self._pieces.append(piece)
                yield piece
            elif isinstance(part, CallEnd):
                self._calls.append(part.call)
        if isinstance(event, Finished):
            self.reply = self._build(event)
            self._finished(self.reply)

    def require_reply(self) -> Reply:
        """Raises InvalidRequest before the generation has finished."""
        if self.reply is None:
            raise InvalidRequest("the reply is not complete.", hint="Read the stream to its end first.")
        return self.reply

    def _build(self, event: Finished) -> Reply:
        def join(channel: str) -> str:
            return "".join(piece.text for piece in self._pieces if piece.channel == channel)

        calls = tuple(self._calls)
        return Reply(
            join("answer"), join("reasoning"), calls, event.reason, event.stop, event.tokens, event.seed, event.metrics
        )


class ReplyStream(Iterator[Piece]):
    """Pieces of text as they are generated. Generation starts at the first piece; `close`, or dropping the stream,
    cancels it.
    """

    def __init__(self, start: Callable[[], Stream[Event]], builder: ReplyBuilder) -> None:
        self._builder = builder
        self._pieces = _read(start, builder)

    def __next__(self) -> Piece:
        """Raises any EdgespecError of the generation."""
        return next(self._pieces)

    @property
    def reply(self) -> Reply:
        """Raises InvalidRequest before the stream has ended."""
        return self._builder.require_reply()

    def read(self) -> Reply:
        """Read the rest of the stream. Raises any EdgespecError of the generation, InvalidRequest after `close`."""
        for _ in self._pieces:
            pass
        return self.reply

    def close(self) -> None:
        """Cancel the generation, unless it has ended."""
        self._pieces.close()


class AsyncReplyStream(AsyncIterator[Piece]):
    """`ReplyStream` for `async for`."""

    def __init__(self, start: Callable[[], Stream[Event]], builder: ReplyBuilder) -> None:
        self._builder = builder
        self._pieces = _read_async(start, builder)

    async def __anext__(self) -> Piece:
        """Raises any EdgespecError of the generation."""
        return await anext(self._pieces)

    @property
    def reply(self) -> Reply:
        """Raises InvalidRequest before the stream has ended."""
        return self._builder.require_reply()

    async def read(self) -> Reply:
        """Read the rest of the stream. Raises any EdgespecError of the generation, InvalidRequest after `aclose`."""
        async for _ in self._pieces:
            pass
        return self.reply

    async def aclose(self) -> None:
        """Cancel the generation, unless it has ended."""
        await self._pieces.aclose()


def _read(start: Callable[[], Stream[Event]], builder: ReplyBuilder) -> Generator[Piece, None, None]:
    events = start()
    try:
        for event in events:
            yield from builder.add(event)
    finally:
        events.cancel()


async def _read_async(start: Callable[[], Stream[Event]], builder: ReplyBuilder) -> AsyncGenerator[Piece, None]:
    events = start()
    try:
        async for event in events:
            for piece in builder.add(event):
                yield piece
    finally:
        events.cancel()
