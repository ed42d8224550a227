"""A loaded model: `load` and `Model`, and the same for asyncio."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Self

from edgespec.answers.response import ResponseStream
from edgespec.api.log import LogReporter
from edgespec.api.options import GenerationArguments, LoadArguments, build_load_config, require_known
from edgespec.api.reply import AsyncReplyStream, Reply, ReplyStream
from edgespec.api.request import Messages, Prompt, prepare
from edgespec.client.client import EngineClient, closed
from edgespec.client.local import LocalEngine
from edgespec.client.stream import Stream
from edgespec.core.metrics import Metrics
from edgespec.engine.events import Event, Request
from edgespec.engine.model_info import ModelInfo
from edgespec.errors import BackendError, InvalidRequest
from edgespec.models.load_config import LoadConfig
from edgespec.progress import Reporter
from edgespec.text.chat_template import Message

if TYPE_CHECKING:
    from typing import Unpack


def load(
    model: str | PathLike[str] | None = None, *, reporter: Reporter | None = None, **arguments: Unpack[LoadArguments]
) -> Model:
    """Load a model and its draft, and download what is missing.

    `model` is an alias (`edgespec list`), user/repo:QUANT, hf:user/repo/file.gguf or a path; None is the one
    that commands open by default, see `Registry.default`. `reporter` receives notices and progress; by default they
    go to the logger "edgespec". Raises any EdgespecError.
    """
    config, client = _prepare_load(model, arguments)
    try:
        client.open(config, reporter or LogReporter()).result()
    except BaseException:
        client.close()
        raise
    return Model(client)


async def load_async(
    model: str | PathLike[str] | None = None, *, reporter: Reporter | None = None, **arguments: Unpack[LoadArguments]
) -> AsyncModel:
    """`load` without blocking the event loop. Cancelling the task stops the download or the loading."""
    config, client = _prepare_load(model, arguments)
    try:
        await client.open(config, reporter or LogReporter()).wait()
    except BaseException:
        await asyncio.shield(asyncio.to_thread(client.close))
        raise
    return AsyncModel(client)


def _prepare_load(model: str | PathLike[str] | None, arguments: LoadArguments) -> tuple[LoadConfig, EngineClient]:
    """(what to load, the client of an engine that will load it). Raises InvalidRequest, TypeError.

    The engine is in this process, or in one of its own if it is `isolated`. With workers it always has its own, since a
    lost worker ends the process.
    """
    require_known("load", arguments, LoadArguments.__annotations__)
    if not (model is None or isinstance(model, str | PathLike)):
        raise InvalidRequest(
            f"a model is named by a text or a path, not by {model!r}.", hint="`edgespec list` shows names."
        )
    config = build_load_config(os.path.abspath(model) if isinstance(model, PathLike) else model, arguments)
    if not (config.load.workers or arguments.get("isolated")):
        return config, LocalEngine()
    from edgespec.client.process import EngineProcess

    return config, EngineProcess("Load the model again.")


class _BaseModel:
    """What both kinds of model share. Threads or tasks may use one model together: `parallel` of them share its
    forwards; additional calls are queued.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._stats: Metrics | None = None
        self._process = os.getpid()
        self._close = weakref.finalize(self, _close, client, self._process)  # also when the program ends

    @property
    def info(self) -> ModelInfo:
        """Name, runtime, draft, context size and memory. Raises BackendError after `close`, and in a forked process."""
        if os.getpid() != self._process:
            raise BackendError("the model belongs to another process.", hint="Load it in each process, after the fork.")
        if not self._close.alive or (model_info := self._client.model_info) is None:
            raise closed()
        return model_info

    @property
    def stats(self) -> Metrics:
        """Metrics of the generation that finished last. Raises InvalidRequest before the first one.

        `tokens_per_second`, `acceptance_rate`, `tau` (emitted tokens per target forward), `speedup` (speed over
        that of plain decoding, for 32 tokens or more, some of them drafted), and times in seconds.
        """
        if self._stats is None:
            raise InvalidRequest("nothing has been generated yet.", hint="Call generate() first.")
        return self._stats

    def _prepare(
        self, function: str, prompt: Prompt, arguments: GenerationArguments
    ) -> tuple[Callable[[], Stream[Event]], ResponseStream, Callable[[Metrics], None]]:
        request, response = prepare(function, prompt, arguments, self.info)
        return partial(self._begin, request), response, self._finish

    def _begin(self, request: Request) -> Stream[Event]:
        _ = self.info  # the stream may have been made before `close` or a fork
        return self._client.stream(request)

    def _finish(self, metrics: Metrics) -> None:
        self._stats = metrics


def _close(client: EngineClient, process: int) -> None:
    """Close an engine in the process that has opened it: the threads that would answer do not survive a fork."""
    if os.getpid() == process:
        client.close()


class Model(_BaseModel):
    """A loaded model. A context manager: leaving it closes the model."""

    def generate(self, prompt: str, **arguments: Unpack[GenerationArguments]) -> Reply:
        """Continue `prompt` as it stands, without the chat template. Raises any EdgespecError."""
        return ReplyStream(*self._prepare("generate", _require_text(prompt), arguments)).read()

    def chat(self, messages: str | Messages, **arguments: Unpack[GenerationArguments]) -> Reply:
        """Answer `messages`, through the model's chat template; a text is one user message.

        A message is a `Message` or a dictionary in OpenAI's form. Raises any EdgespecError.
        """
        return ReplyStream(*self._prepare("chat", _to_messages(messages), arguments)).read()

    def stream(self, prompt: Prompt, **arguments: Unpack[GenerationArguments]) -> ReplyStream:
        """The pieces of `generate` (for a text) or `chat` (for messages), each with its drafter: the one that
        proposed it, '' for the target itself. Raises InvalidRequest; the stream raises any EdgespecError.
        """
        return ReplyStream(*self._prepare("stream", prompt, arguments))

    def close(self) -> None:
        """Cancel what is under way, store what the autopilot has learned, free the model."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncModel(_BaseModel):
    """`Model` for asyncio: the same methods, to be awaited."""

    async def generate(self, prompt: str, **arguments: Unpack[GenerationArguments]) -> Reply:
        """Generates as `Model.generate` does, without blocking the event loop."""
        return await AsyncReplyStream(*self._prepare("generate", _require_text(prompt), arguments)).read()

    async def chat(self, messages: str | Messages, **arguments: Unpack[GenerationArguments]) -> Reply:
        """Answers as `Model.chat` does, without blocking the event loop."""
        return await AsyncReplyStream(*self._prepare("chat", _to_messages(messages), arguments)).read()

    def stream(self, prompt: Prompt, **arguments: Unpack[GenerationArguments]) -> AsyncReplyStream:
        """Streams as `Model.stream` does; read it with `async for`."""
        return AsyncReplyStream(*self._prepare("stream", prompt, arguments))

    async def close(self) -> None:
        """Closes the model as `Model.close` does, without blocking the event loop."""
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _require_text(prompt: str) -> str:
    if not isinstance(prompt, str):
        raise InvalidRequest("generate() takes a text.", hint="Use chat() for messages.")
    return prompt


def _to_messages(messages: str | Messages) -> Messages:
    """Raises InvalidRequest if there are none."""
    if not messages:
        raise InvalidRequest("the prompt is empty.", hint="Give a text, or messages.")
    return (Message("user", messages),) if isinstance(messages, str) else messages
