"""Generation behind each interface: a body becomes requests, their parts a response or a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from edgespec.engine.events import MemoryUse
from edgespec.engine.events import Request as EngineRequest
from edgespec.server.fields import GenerationBody, Writer, compute
from edgespec.server.http import EventStream, respond_unless_disconnected
from edgespec.server.models import AnySlot, Models
from edgespec.server.record import request_context
from edgespec.server.remote_slot import RemoteSlot
from edgespec.server.slots import Answer, ModelSlot, Turn
from edgespec.service.generation_spec import GenerationSpec
from edgespec.service.response import Part, ResponseStream, Started, merge_deltas


async def generate(
    request: Request, models: Models, body: GenerationBody, stream: type[EventStream] = EventStream
) -> Response:
    """The response to `body`: whole, or a `stream` where it asks for one. Raises any EdgespecError."""
    slot = models.choose(body.model)
    body.model = body.model or slot.name  # which the answer repeats
    raw = await request.body()
    writer, warnings = body.writer(), slot.apply_keep_alive(body.keep_alive)
    memory = request_context().caller.memory if body.memory is not False else None
    if isinstance(slot, RemoteSlot):
        answers = await slot.answers(body, raw, remembers=memory == MemoryUse())
    else:
        specs = await compute(len(raw), body.generation_specs)
        specs = [replace(spec, warnings=(*spec.warnings, *warnings), memory=memory) for spec in specs]
        answers = [partial(_generate, slot, spec, len(raw)) for spec in specs]
    parts = generate_parts(models, slot, answers, body.n or 1)
    if body.stream:
        return stream(
            request.url.path,
            _stream(parts, writer, stream.format),
            lambda error: b"".join(map(stream.format, writer.fail(error))),
        )

    async def collect() -> dict[str, Any]:
        async with aclosing(parts) as batches:
            async for index, batch in batches:
                for part in batch:
                    list(writer.events(index, part))
        return writer.response_body()

    return await respond_unless_disconnected(request, collect())


async def _stream(
    parts: AsyncGenerator[tuple[int, list[Part]], None], writer: Writer, write: Callable[[dict[str, Any]], bytes]
) -> AsyncGenerator[bytes, None]:
    """The events of each batch as one piece: every piece is sent on its own."""
    async with aclosing(parts):
        async for index, batch in parts:
            if piece := b"".join(write(event) for part in batch for event in writer.events(index, part)):
                yield piece
    if piece := b"".join(map(write, writer.finish())) + writer.last:
        yield piece


async def generate_parts(
    models: Models, slot: AnySlot, answers: Sequence[Answer], copies: int
) -> AsyncGenerator[tuple[int, list[Part]], None]:
    """The parts of `copies` of each of `answers`, in batches of one answer with its index. The parts of one come in
    order.

    Raises any EdgespecError. It ends all the answers.
    """
    if len(answers) == copies == 1:
        async with aclosing(answers[0](await models.enter(slot), 0)) as batches:
            async for parts in batches:
                yield 0, parts
        return
    several = _Answers(models, slot, answers, copies)
    work = asyncio.create_task(several.run())
    work.add_done_callback(lambda _: several.found.put_nowait(None))
    try:
        while (found := await several.found.get()) is not None:
            yield found
        await work
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


@dataclass(slots=True)
class _Answers:
    """Several answers to one request. `found` gets their parts, in batches, with the index of the answer."""

    models: Models
    slot: AnySlot
    answers: Sequence[Answer]
    copies: int
    found: asyncio.Queue[tuple[int, list[Part]] | None] = field(default_factory=asyncio.Queue)

    async def run(self) -> None:
        """Each asks for its turn after the one before has got it, so the request never has two places in the queue.

        Another answer to the same prompt begins when the first has read it: it finds the prompt in that one's cache.
        """
        are_read = [asyncio.Event() for _ in self.answers]
        try:
            async with asyncio.TaskGroup() as group:
                for copy in range(self.copies):
                    for number, answer in enumerate(self.answers):
                        if copy:
                            await are_read[number].wait()
                        has_turn = asyncio.Event()
                        index = number * self.copies + copy
                        group.create_task(self._run_one(index, answer, copy, has_turn, are_read[number]))
                        await has_turn.wait()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run_one(
        self, index: int, answer: Answer, copy: int, has_turn: asyncio.Event, is_read: asyncio.Event
    ) -> None:
        turn = await self.models.enter(self.slot, is_new=index == 0)
        has_turn.set()
        async with aclosing(answer(turn, copy)) as batches:
            async for parts in batches:
                self.found.put_nowait((index, parts))
                if any(not isinstance(part, Started) for part in parts):
                    is_read.set()


async def _generate(
    slot: ModelSlot, spec: GenerationSpec, body_bytes: int, turn: Turn, copy: int
) -> AsyncGenerator[list[Part], None]:
    model_info = turn.model_info
    assert model_info is not None

    def prepare() -> tuple[EngineRequest, ResponseStream]:
        request = spec.build_request(model_info, token_limit=model_info.context_size, copy=copy)
        return request, spec.make_response(model_info, model_info.plain_speed)

    try:
        request, response = await compute(body_bytes, prepare)
        speculation = spec.draft_length.apply(model_info.speculation)
    except BaseException:
        slot.leave()
        raise
    async with slot.stream(request, turn.ends_s, speculation) as batches:  # which ends the turn
        async for batch in batches:
            yield merge_deltas([part for event in batch for part in response.parts(event)])
