"""The models of a server, which are loaded on demand and unloaded when idle, and answers to requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from time import time
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from edgespec.answers.generation_spec import GenerationSpec
from edgespec.answers.response import Part, Started, merge_deltas
from edgespec.client.client import EngineClient
from edgespec.client.stream import Stream
from edgespec.core.metrics import Reading
from edgespec.engine.events import MemoryUse
from edgespec.engine.model_info import ModelInfo
from edgespec.errors import EdgespecError, InvalidRequest, UnknownModel, reason_of
from edgespec.machines.memory import DeviceMemory
from edgespec.models.file_facts import FileFacts
from edgespec.models.load_config import LoadConfig
from edgespec.server.answers import Writer
from edgespec.server.fields import GenerationBody
from edgespec.server.http import EventStream, Policy, respond_unless_disconnected
from edgespec.server.media import require_text
from edgespec.server.metrics import ServerMetrics
from edgespec.server.record import request_context
from edgespec.server.remote import RemoteSlot
from edgespec.server.remote_client import RemoteModel
from edgespec.server.slots import GenerateAnswer, ModelSlot

_IDLE_CHECK_S = 1.0
_POLL_S = 0.1
_ASK_S = 1.0  # for an engine to answer `ask`
_IN_MEMORY = ("loaded", "unloading")
_LOG = logging.getLogger("edgespec.server")
_TAG = ":latest"
"""What Ollama's clients append to names."""

AnySlot = ModelSlot | RemoteSlot
T = TypeVar("T")


class LocalModel(NamedTuple):
    """A model of this machine.

    keep_alive_s  how long it stays loaded; None: as the policy says
    facts         what its file tells; None if it is not downloaded
    """

    config: LoadConfig
    keep_alive_s: float | None = None
    facts: FileFacts | None = None


class Models:
    """The slots by the names that clients use, and the limit of loaded models."""

    def __init__(
        self,
        models: Mapping[str, LocalModel | RemoteModel],
        policy: Policy,
        server_metrics: ServerMetrics,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """`aliases`: other names that clients may use, with the name in `models` that each stands for."""
        self.slots: dict[str, ModelSlot] = {}
        self.remotes: dict[str, RemoteSlot] = {}
        self.is_preloading = False
        self._aliases = aliases or {}
        self._policy = policy
        self._server_metrics = server_metrics
        for name, each in models.items():
            if isinstance(each, RemoteModel):
                self.remotes[name] = RemoteSlot(name, each, policy, server_metrics)
            else:
                own = policy if each.keep_alive_s is None else replace(policy, keep_alive_s=each.keep_alive_s)
                self.slots[name] = ModelSlot(name, each.config, own, server_metrics, each.facts)
        self._only = self.all[0] if len(self.all) == 1 else None
        self._opening = asyncio.Lock()
        self.created_s = int(time())

    @property
    def all(self) -> list[AnySlot]:
        """Those of this machine, then those of other servers."""
        return [*self.slots.values(), *self.remotes.values()]

    def choose(self, name: str) -> AnySlot:
        """The model of a call. If the server was started with one, that answers to unknown names too.

        Raises UnknownModel.
        """
        return self._look_up(name) or self._only or self.find(name)

    def describe(self, slot: AnySlot) -> dict[str, Any]:
        """A model as OpenAI lists it, with its context in tokens and, as in llama.cpp's server, its status. `owned_by`
        names the kind of server that runs the model: another edgespec knows by it which fields it may send.

        `owned_by` is that of the server that has the model, because it tells another edgespec what may be sent.
        """
        kind = {"object": "model", "created": self.created_s, "owned_by": slot.owner or "unknown"}
        return {"id": slot.name, **kind, "context_length": slot.context_size, "status": {"value": slot.state}}

    def find(self, name: str) -> AnySlot:
        if (slot := self._look_up(name)) is None:
            names = ", ".join(sorted(each.name for each in self.all))
            fault = f"there is no model '{name}' here." if name else "the request names no model."
            raise UnknownModel(fault, hint=f"There are: {names}.")
        return slot

    def _look_up(self, name: str) -> AnySlot | None:
        for each in (name, name.removesuffix(_TAG)):
            for own in (each, self._aliases.get(each, each)):
                if slot := self.slots.get(own) or self.remotes.get(own):
                    return slot
        return None

    @asynccontextmanager
    async def turn(self, slot: AnySlot, *, is_new: bool = True) -> AsyncIterator[ModelInfo | None]:
        """Wait for a turn in `slot`, load its model and yield it; None for a model of another server. Raises HttpError
        if `is_new` and the queue is full, or any EdgespecError.
        """
        async with slot.turn(is_new=is_new):
            yield await self._require(slot) if isinstance(slot, ModelSlot) else None

    @asynccontextmanager
    async def visit(self, slot: ModelSlot) -> AsyncIterator[ModelInfo]:
        """Load the model and keep it loaded for work that needs no turn, such as counting tokens; see ModelSlot.read.

        Raises what `turn` raises, but never for a full queue.
        """
        async with slot.visit():
            yield await self._require(slot)

    async def ask(self, slot: ModelSlot, ask: Callable[[EngineClient], Stream[Sequence[T]]]) -> Sequence[T] | None:
        """Return what `ask` reads from the engine of a loaded model. None if the model is not loaded, or if the engine
        does not answer within _ASK_S.
        """
        if slot.client is not None and slot.model_info is not None:
            with suppress(TimeoutError, EdgespecError):
                return await asyncio.wait_for(ask(slot.client).wait(), _ASK_S)
        return None

    async def find_devices(self) -> Sequence[DeviceMemory]:
        """The accelerators of the loaded models with their memory now."""
        for slot in self.slots.values():
            if (found := await self.ask(slot, EngineClient.devices)) is not None:
                return found
        return ()

    async def _require(self, slot: ModelSlot) -> ModelInfo:
        if (model_info := slot.model_info) is not None:
            return model_info
        if slot.opening is None:  # a task of its own: a caller that leaves must not cancel it for the others
            slot.opening = asyncio.create_task(self._open(slot))
        return await asyncio.shield(slot.opening)

    async def _open(self, slot: ModelSlot) -> ModelInfo:
        try:
            async with self._opening:  # one load at a time, since it may unload another model
                await self._evict_for(slot)
                return await slot.open(measures_later=not self.is_preloading)
        except Exception as error:
            reason = error.message if isinstance(error, EdgespecError) else reason_of(error)
            self._server_metrics.metric("failed_opens", slot.name).inc()
            _LOG.warning("%s: not loaded: %s", slot.name, reason)
            raise
        finally:
            slot.opening = None

    async def preload(self, names: Sequence[str]) -> None:
        """Load models of this machine, one after the other; the log tells of failures."""
        self.is_preloading = True
        for name in names:
            with suppress(Exception):  # which `_open` has noted
                await self._require(self.slots[name])
        self.is_preloading = False

    async def watch(self) -> None:
        """Unload models that are idle for too long. Never returns."""
        while True:
            await asyncio.sleep(_IDLE_CHECK_S)
            for slot in tuple(self.slots.values()):
                if slot.client is not None and not slot.is_busy and not slot.unloads_in_s:
                    await slot.unload()

    async def close(self) -> None:
        for slot in self.slots.values():
            if slot.opening is not None:
                slot.opening.cancel()
        await asyncio.gather(*(slot.close() for slot in self.all))

    async def _evict_for(self, slot: ModelSlot) -> None:
        """Unload models, idle and least recently used first, until `slot` may be loaded."""
        others = [each for each in self.slots.values() if each is not slot and each.state in _IN_MEMORY]
        others.sort(key=lambda each: (each.is_busy, each.used_s))
        for each in others[: max(0, len(others) + 1 - self._policy.max_open)]:
            unloading = asyncio.create_task(each.unload())
            # Polls: a model that crashes meanwhile holds no memory any more, but `unload` may not return, because the
            # model's callers wait for the lock that this load holds.
            while each.state in _IN_MEMORY and not (await asyncio.wait({unloading}, timeout=_POLL_S))[0]:
                pass
            unloading.cancel()


def require_local(slot: AnySlot) -> ModelSlot:
    """`slot`, if its model is one of this machine. Raises InvalidRequest."""
    if isinstance(slot, RemoteSlot):
        raise InvalidRequest(f"'{slot.name}' is a model of another server, which manages it.", hint="Ask that server.")
    return slot


async def generate(
    request: Request, models: Models, body: GenerationBody, stream: type[EventStream] = EventStream
) -> Response:
    """The response to `body`: whole, or a `stream` if it asks for one. Raises any EdgespecError."""
    slot = models.choose(body.model)
    body.model = body.model or slot.name  # which the answer repeats
    writer, warnings = body.writer(), slot.apply_keep_alive(body.keep_alive)
    memory = request_context().caller.memory if body.memory is not False else None
    if isinstance(slot, RemoteSlot):
        answers = await slot.answers(body, await request.body(), remembers=memory == MemoryUse())
    else:
        owner = request_context().caller.owner
        require_text(body.said(), owner)
        specs = [
            replace(spec, warnings=(*spec.warnings, *body.warnings, *warnings), memory=memory, owner=owner)
            for spec in body.generation_specs()
        ]
        answers = [partial(_generate, slot, spec) for spec in specs]
    parts = generate_parts(models, slot, answers, body.n or 1)
    events = _format(parts, writer, stream if body.stream else None)
    if body.stream:
        return stream(request.url.path, events, lambda error: b"".join(map(stream.format, writer.fail(error))))

    async def collect() -> dict[str, Any]:
        async with aclosing(events):
            async for _ in events:
                pass
        return writer.response_body()

    return await respond_unless_disconnected(request, collect())


async def _format(
    parts: AsyncGenerator[tuple[int, list[Part]], None], writer: Writer, stream: type[EventStream] | None
) -> AsyncGenerator[bytes, None]:
    """Yield the events of each batch as one piece of bytes, since every piece is sent on its own. Without a `stream`
    nothing is yielded: the writer keeps what a whole response needs.
    """

    def write(events: Iterable[dict[str, Any]]) -> bytes:
        return b"".join([stream.format(event) if stream is not None else b"" for event in events])

    async with aclosing(parts):
        async for index, batch in parts:
            pieces = [write(writer.events(index, part)) for part in batch]
            if stream is not None:
                pieces += [stream.comment(f"reading {part}") for part in batch if isinstance(part, Reading)]
            if piece := b"".join(pieces):
                yield piece
    if piece := write(writer.finish()) + writer.last:
        yield piece


async def generate_parts(
    models: Models, slot: AnySlot, answers: Sequence[GenerateAnswer], copies: int
) -> AsyncGenerator[tuple[int, list[Part]], None]:
    """Yield the parts of all answers in batches: the index of an answer, and its next parts. Each of `answers` is
    generated `copies` times; the index is its number * copies + the number of the copy. The parts of one answer come in
    order.

    Each answer asks for its turn after the one before has got it, so the request never has two places in the queue. A
    further copy begins when the first one has read the prompt, which it then finds in the cache. An error, which is any
    EdgespecError, ends all the answers.
    """
    found: asyncio.Queue[tuple[int, list[Part]] | None] = asyncio.Queue()
    are_read = [asyncio.Event() for _ in answers]

    async def run_one(number: int, copy: int, has_turn: asyncio.Event) -> None:
        async with models.turn(slot, is_new=not (number or copy)) as model_info:
            has_turn.set()
            async with aclosing(answers[number](model_info, copy)) as batches:
                async for parts in batches:
                    found.put_nowait((number * copies + copy, parts))
                    if any(not isinstance(part, Started | Reading) for part in parts):
                        are_read[number].set()

    async def run_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for copy, number in product(range(copies), range(len(answers))):
                    if copy:
                        await are_read[number].wait()
                    has_turn = asyncio.Event()
                    group.create_task(run_one(number, copy, has_turn))
                    await has_turn.wait()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            found.put_nowait(None)

    work = asyncio.create_task(run_all())
    try:
        while (batch := await found.get()) is not None:
            yield batch
        await work
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def _generate(
    slot: ModelSlot, spec: GenerationSpec, model_info: ModelInfo | None, copy: int
) -> AsyncGenerator[list[Part], None]:
    assert model_info is not None
    request = spec.build_request(model_info, token_limit=model_info.context_size, copy=copy)
    response = spec.make_response(model_info)
    speculation = spec.limit_drafts(model_info.speculation)
    async with aclosing(slot.stream(request, speculation)) as batches:
        async for batch in batches:
            yield merge_deltas([part for event in batch for part in response.parts(event)])
