"""Replies: the whole one, and the streams of text that lead to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from edgespec.answers.response import ReasoningDelta, ResponseStream, TextDelta
from edgespec.answers.tools import format_call
from edgespec.api.log import LOG
from edgespec.client.stream import Stream
from edgespec.core.metrics import Metrics
from edgespec.core.protocols import FinishReason
from edgespec.engine.events import Event, Finished, Notice
from edgespec.errors import InvalidRequest
from edgespec.text.reasoning import Channel
from edgespec.text.stream import Piece
from edgespec.text.tool_calls import CallEnd, ToolCall


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


class _Answer(ABC):
    """One generation: how it starts, and what has come of it. `finished` is called with its metrics."""

    def __init__(
        self, start: Callable[[], Stream[Event]], response: ResponseStream, finished: Callable[[Metrics], None]
    ) -> None:
        self._start = start
        self._response = response
        self._finished = finished
        self._reply: Reply | None = None
        self._texts: dict[Channel, str] = {"answer": "", "reasoning": ""}
        self._calls: list[ToolCall] = []
        self._drafter = ""  # of the latest piece; a reader may have held back its text
        self._pieces = self._read()

    @abstractmethod
    def _read(self) -> Any:
        """The generator of the pieces."""

    @property
    def reply(self) -> Reply:
        """Raises InvalidRequest before the stream has ended."""
        if self._reply is None:
            raise InvalidRequest("the reply is not complete.", hint="Read the stream to its end first.")
        return self._reply

    def _add(self, event: Event) -> Iterator[Piece]:
        if isinstance(event, Piece):
            self._drafter = event.drafter
        elif isinstance(event, Notice):
            LOG.warning(event.text)
        for part in self._response.parts(event):
            if isinstance(part, TextDelta | ReasoningDelta):
                channel: Channel = "answer" if isinstance(part, TextDelta) else "reasoning"
                self._texts[channel] += part.text
                yield Piece(part.text, channel, self._drafter)
            elif isinstance(part, CallEnd):
                self._calls.append(part.call)
        if isinstance(event, Finished):
            self._reply = Reply(
                self._texts["answer"], self._texts["reasoning"], tuple(self._calls), event.reason, event.stop,
                event.tokens, event.seed, event.metrics,
            )  # fmt: skip
            self._finished(event.metrics)


class ReplyStream(_Answer, Iterator[Piece]):
    """Pieces of text as they are generated. Generation starts at the first piece; `close`, or dropping the stream,
    cancels it.
    """

    _pieces: Generator[Piece, None, None]

    def _read(self) -> Generator[Piece, None, None]:
        events = self._start()
        try:
            for event in events:
                yield from self._add(event)
        finally:
            events.cancel()

    def __next__(self) -> Piece:
        """Raises any EdgespecError of the generation."""
        return next(self._pieces)

    def read(self) -> Reply:
        """Read the rest of the stream. Raises any EdgespecError of the generation, InvalidRequest after `close`."""
        for _ in self._pieces:
            pass
        return self.reply

    def close(self) -> None:
        """Cancel the generation, unless it has ended."""
        self._pieces.close()


class AsyncReplyStream(_Answer, AsyncIterator[Piece]):
    """`ReplyStream` for `async for`."""

    async def _read(self) -> AsyncGenerator[Piece, None]:
        events = self._start()
        try:
            async for event in events:
                for piece in self._add(event):
                    yield piece
        finally:
            events.cancel()

    async def __anext__(self) -> Piece:
        """Raises any EdgespecError of the generation."""
        return await anext(self._pieces)

    async def read(self) -> Reply:
        """Read the rest of the stream. Raises any EdgespecError of the generation, InvalidRequest after `aclose`."""
        async for _ in self._pieces:
            pass
        return self.reply

    async def aclose(self) -> None:
        """Cancel the generation, unless it has ended."""
        await self._pieces.aclose()
