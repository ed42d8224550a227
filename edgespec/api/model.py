"""A loaded model: `load` and `Model`, and the same for asyncio."""

from __future__ import annotations

import asyncio
import logging
import weakref
from functools import partial
from typing import TYPE_CHECKING, Self

from edgespec.api.options import GenerationArguments, LoadArguments, build_load_config, require_known
from edgespec.api.reply import AsyncReplyStream, Messages, Prompt, Reply, ReplyBuilder, ReplyStream, prepare
from edgespec.core.metrics import Metrics
from edgespec.errors import BackendError, InvalidRequest
from edgespec.planner.plan import LoadConfig, Reporter
from edgespec.service.client import EngineClient, ModelInfo
from edgespec.service.local import LocalEngine
from edgespec.text.chat_template import Message

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from edgespec.engine.events import Event
    from edgespec.service.client import Stream

_LOG = logging.getLogger("edgespec")
_PROGRESS_STEP = 0.1


def load(model: str | None = None, *, reporter: Reporter | None = None, **arguments: Unpack[LoadArguments]) -> Model:
    """Load a model and its draft, and download what is missing.

    `model` is an alias (`edgespec list`), user/repo:QUANT, hf:user/repo/file.gguf or a path; None is the one
    that commands open without a name, see `Registry.default`. `reporter` receives notices and progress; by default they
    go to the logger "edgespec". Raises any EdgespecError.
    """
    config = _build_config(model, arguments)
    client = _make_client(config)
    try:
        client.open(config, reporter or LogReporter()).result()
    except BaseException:
        client.close()
        raise
    return Model(client)


async def load_async(
    model: str | None = None, *, reporter: Reporter | None = None, **arguments: Unpack[LoadArguments]
) -> AsyncModel:
    """`load` without blocking the event loop. Cancelling the task stops the download or the loading."""
    config = _build_config(model, arguments)
    client = _make_client(config)
    try:
        await client.open(config, reporter or LogReporter()).wait()
    except BaseException:
        await asyncio.shield(asyncio.to_thread(client.close))
        raise
    return AsyncModel(client)


def _build_config(model: str | None, arguments: LoadArguments) -> LoadConfig:
    require_known("load", arguments, LoadArguments.__annotations__)
    return build_load_config(model, {"memory": False, **arguments})


def _make_client(config: LoadConfig) -> EngineClient:
    """An engine in this process; with workers in one of its own, since llama.cpp ends it where one is lost."""
    if not config.load.workers:
        return LocalEngine()
    from edgespec.service.process import EngineProcess

    return EngineProcess("Load the model again.")


class _BaseModel:
    """What both kinds of model share. Threads or tasks may use one model together: `parallel` of them share its
    forwards; additional calls are queued.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._stats: Metrics | None = None
        self._close = weakref.finalize(self, client.close)  # also when the program ends

    @property
    def info(self) -> ModelInfo:
        """Name, runtime, draft, context size and memory. Raises BackendError after `close`."""
        if not self._close.alive or (model_info := self._client.model_info) is None:
            raise BackendError("the model has been closed.", hint="Load it again.")
        return model_info

    @property
    def stats(self) -> Metrics:
        """Metrics of the generation that finished last. Raises InvalidRequest before the first one.

        `tokens_per_second`, `acceptance_rate`, `tau` (emitted tokens per target forward), `times_plain` (speed over
        that of plain decoding, where it has been measured), and times in seconds.
        """
        if self._stats is None:
            raise InvalidRequest("nothing has been generated yet.", hint="Call generate() first.")
        return self._stats

    def _prepare(
        self, function: str, prompt: Prompt, arguments: GenerationArguments
    ) -> tuple[Callable[[], Stream[Event]], ReplyBuilder]:
        request, response = prepare(function, prompt, arguments, self.info)
        return partial(self._client.stream, request), ReplyBuilder(response, self._finish)

    def _finish(self, reply: Reply) -> None:
        self._stats = reply.stats


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
        """The pieces of `generate` (for a text) or `chat` (for messages), each with its origin: the drafter that
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


class LogReporter:
    """Logs notices at WARNING and progress at INFO, every 10%."""

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}

    def notice(self, text: str) -> None:
        _LOG.warning(text)

    def download(self, name: str, done: int, total: int) -> None:
        self._log("downloading", name, done / total if total else 1.0)

    def loading(self, name: str, fraction: float) -> None:
        self._log("loading", name, fraction)

    def _log(self, action: str, name: str, fraction: float) -> None:
        key = f"{action} {name}"
        if fraction - self._logged.get(key, -1.0) >= _PROGRESS_STEP:
            self._logged[key] = fraction
            _LOG.info("%s: %.0f%%", key, fraction * 100)


def _require_text(prompt: str) -> str:
    if not isinstance(prompt, str):
        raise InvalidRequest("generate() takes a text.", hint="Use chat() for messages.")
    return prompt


def _to_messages(messages: str | Messages) -> Messages:
    return (Message("user", messages),) if isinstance(messages, str) else messages
