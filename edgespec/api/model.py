"""A loaded model: `load` and `Model`, and the same for asyncio."""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, cast

from edgespec.api.options import GenerationArguments, LoadArguments, build_load_config, require_known, resolve_sampling
from edgespec.core.metrics import Metrics
from edgespec.core.protocols import FinishReason
from edgespec.engine.events import Event, Finished, MemoryUse, Notice, Request
from edgespec.engine.structured_output import json_structure
from edgespec.errors import BackendError, InvalidRequest
from edgespec.planner.plan import LoadConfig, Reporter
from edgespec.service.client import EngineClient, ModelInfo, Stream, closed
from edgespec.service.generation_spec import GenerationSpec, ToolChoiceMode, make_message
from edgespec.service.local import LocalEngine
from edgespec.service.response import ReasoningDelta, ResponseStream, TextDelta
from edgespec.service.tools import Tool, format_call, make_tool, parse_arguments
from edgespec.text.chat_template import Message
from edgespec.text.stream import Channel, Piece
from edgespec.text.tool_calls import CallEnd, ToolCall

if TYPE_CHECKING:
    from typing import Unpack


_LOG = logging.getLogger("edgespec")


def load(
    model: str | PathLike[str] | None = None, *, reporter: Reporter | None = None, **arguments: Unpack[LoadArguments]
) -> Model:
    """Load a model and its draft, and download what is missing.

    `model` is an alias (`edgespec list`), user/repo:QUANT, hf:user/repo/file.gguf or a path; None is the one
    that commands open without a name, see `Registry.default`. `reporter` receives notices and progress; by default they
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
    """The engine is in this process, or isolated; with workers it always is, since a lost one ends its process."""
    require_known("load", arguments, LoadArguments.__annotations__)
    if not (model is None or isinstance(model, str | PathLike)):
        raise InvalidRequest(
            f"a model is named by a text or a path, not by {model!r}.", hint="`edgespec list` shows names."
        )
    config = build_load_config(os.path.abspath(model) if isinstance(model, PathLike) else model, arguments)
    if not (config.load.workers or arguments.get("isolated")):
        return config, LocalEngine()
    from edgespec.service.process import EngineProcess

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

        `tokens_per_second`, `acceptance_rate`, `tau` (emitted tokens per target forward), `times_plain` (speed over
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
        self._logged: dict[str, int] = {}

    def notice(self, text: str) -> None:
        _LOG.warning(text)

    def download(self, name: str, done: int, total: int) -> None:
        self._log(f"downloading {name}", done / max(total, 1))

    def loading(self, name: str, fraction: float) -> None:
        self._log(f"loading {name}", fraction)

    def _log(self, action: str, fraction: float) -> None:
        tenths = int(10 * fraction)
        if tenths != self._logged.get(action):
            self._logged[action] = tenths
            _LOG.info("%s: %d%%", action, 10 * tenths)


def _require_text(prompt: str) -> str:
    if not isinstance(prompt, str):
        raise InvalidRequest("generate() takes a text.", hint="Use chat() for messages.")
    return prompt


def _to_messages(messages: str | Messages) -> Messages:
    """Raises InvalidRequest where there are none."""
    if not messages:
        raise InvalidRequest("the prompt is empty.", hint="Give a text, or messages.")
    return (Message("user", messages),) if isinstance(messages, str) else messages


# Replies: the whole one, and the streams of text that lead to it.


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
        self._origin = ""  # of the latest piece; a reader may have held back its text
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
            self._origin = event.origin
        elif isinstance(event, Notice):
            _LOG.warning(event.text)
        for part in self._response.parts(event):
            if isinstance(part, TextDelta | ReasoningDelta):
                channel: Channel = "answer" if isinstance(part, TextDelta) else "reasoning"
                self._texts[channel] += part.text
                yield Piece(part.text, channel, self._origin)
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


# From a prompt and keyword arguments to a request of the engine, and to the reader of its answer.


Messages = Sequence[Message | Mapping[str, Any]]
Prompt = str | Messages


def prepare(
    function: str, prompt: Prompt, arguments: GenerationArguments, model_info: ModelInfo
) -> tuple[Request, ResponseStream]:
    """The request, and what reads its answer. Raises InvalidRequest for a value that cannot work, TypeError for an
    argument that does not exist.
    """
    require_known(function, arguments, GenerationArguments.__annotations__)
    max_tokens = arguments.get("max_tokens")
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {max_tokens}.", hint="Give a larger number.")
    choice = arguments.get("tool_choice") or "auto"
    is_name = choice not in ("auto", "none", "required")
    schema = arguments.get("schema")
    spec = GenerationSpec(
        prompt=_build_prompt(prompt, arguments.get("system")),
        max_tokens=max_tokens,
        seed=arguments.get("seed"),
        stop=_list_stops(arguments.get("stop")),
        structure=None if schema is None else json_structure(dict(schema), is_strict=True),
        tools=tuple(_build_tool(each) for each in arguments.get("tools") or ()),
        tool_choice="auto" if is_name else cast("ToolChoiceMode", choice),
        forced_tool=choice if is_name else None,
        parallel_calls=arguments.get("parallel_tool_calls"),
        variables=arguments.get("template_variables") or {},
        memory=MemoryUse(source=arguments.get("memory_source")),
    )
    request = spec.build_request(model_info, token_limit=model_info.context_size)
    request = replace(request, sampling=resolve_sampling(arguments, model_info.sampling))
    return request, spec.make_response(model_info)


def _list_stops(stop: object) -> tuple[str, ...]:
    """The stop texts of an argument, which is None, one or several. Raises InvalidRequest."""
    stops = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(each, str) for each in stops):
        raise InvalidRequest(f"stop is a text or a list of texts, not {stop!r}.", hint="Write stop='END', for example.")
    return tuple(stops)


def _build_prompt(prompt: Prompt, system: str | None) -> str | tuple[Message, ...]:
    if isinstance(prompt, str):
        if system is not None:
            raise InvalidRequest("a system message needs messages.", hint="Use chat().")
        return prompt
    first = () if system is None else (Message("system", system),)
    return (*first, *(each if isinstance(each, Message) else _build_message(each) for each in prompt))


def _build_message(value: Mapping[str, Any]) -> Message:
    extra = dict(value)
    role, content = extra.pop("role", None), extra.pop("content", None)
    if not isinstance(role, str) or not isinstance(content, str | None):
        raise InvalidRequest("a message has a role and a text.", hint='Give {"role": "user", "content": "..."}.')
    if calls := extra.get("tool_calls"):
        extra["tool_calls"] = [_parse_call(call) for call in (calls if isinstance(calls, Sequence) else [calls])]
    return make_message(role, content or "", **extra)


def _parse_call(call: Any) -> dict[str, Any]:
    """A call with its arguments as templates expect them: as an object. Raises InvalidRequest."""
    given = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(given, Mapping):
        raise InvalidRequest(
            "a tool call of a message has a function.",
            hint='Give {"type": "function", "function": {"name": "...", "arguments": "{}"}}.',
        )
    function = dict(given)
    if isinstance(function.get("arguments"), str):
        function["arguments"] = parse_arguments(function["arguments"])
    return {**call, "function": function}


def _build_tool(value: Mapping[str, Any]) -> Tool:
    function = value.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise InvalidRequest(
            "a tool has a function with a name.",
            hint='Give {"type": "function", "function": {"name": "...", "parameters": {...}}}.',
        )
    return make_tool(name, function.get("description"), function.get("parameters"))
