"""Generation behind each interface: a body becomes requests, their parts a response or a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from edgespec.engine.events import MemoryUse
from edgespec.server.answers import generate_parts, local_answers
from edgespec.server.fields import compute
from edgespec.server.http import EventStream, respond_unless_disconnected
from edgespec.server.models import Models
from edgespec.server.record import current_record
from edgespec.server.remote_slot import RemoteSlot
from edgespec.server.slots import Slot
from edgespec.service.generation_spec import GenerationSpec
from edgespec.service.response import Part


class Writer(Protocol):
    """Writes the answers to one request. `index` numbers the answers; the parts of one answer come in order."""

    def add(self, index: int, part: Part) -> None:
        """Collect a part for `response_body`."""

    def response_body(self) -> dict[str, Any]:
        """The body, after all parts have been added."""

    def chunks(self, index: int, part: Part) -> Iterator[bytes]:
        """The events of a part, for a stream."""

    def finish(self) -> Iterator[bytes]:
        """The events after all answers."""

    def fail(self, error: dict[str, Any]) -> bytes:
        """The last events of a stream that fails; `error` is the body that a whole answer would have."""


class GenerationBody(Protocol):
    """A validated body that asks for `n` answers to each of its prompts, at once or as a stream."""

    model: str
    n: Any
    stream: Any
    memory: bool | None

    def generation_specs(self) -> Sequence[GenerationSpec]: ...

    def writer(self) -> Writer: ...

    def keep(self, slot: Slot) -> tuple[str, ...]: ...


async def generate(
    request: Request, models: Models, body: GenerationBody, stream: type[EventStream] = EventStream
) -> Response:
    """The response to `body`: whole, or a `stream` where it asks for one. Raises any EdgespecError."""
    slot = models.choose(body.model)
    body.model = body.model or slot.name  # which the answer repeats
    raw = await request.body()
    writer, warnings = body.writer(), body.keep(slot)
    memory = current_record().caller.memory if body.memory is not False else None
    if isinstance(slot, RemoteSlot):
        answers = await slot.answers(body, raw, remembers=memory == MemoryUse())
    else:
        specs = await compute(len(raw), body.generation_specs)
        specs = [replace(spec, warnings=(*spec.warnings, *warnings), memory=memory) for spec in specs]
        answers = local_answers(slot, specs, len(raw))
    parts = generate_parts(models, slot, answers, body.n or 1)
    if body.stream:
        return stream(request.url.path, _events(parts, writer), writer.fail)

    async def collect() -> dict[str, Any]:
        async with aclosing(parts) as batches:
            async for index, batch in batches:
                for part in batch:
                    writer.add(index, part)
        return writer.response_body()

    return await respond_unless_disconnected(request, collect())


async def _events(parts: AsyncGenerator[tuple[int, list[Part]], None], writer: Writer) -> AsyncGenerator[bytes, None]:
    """The events of each batch as one piece: every piece is sent on its own."""
    async with aclosing(parts):
        async for index, batch in parts:
            if events := b"".join(event for part in batch for event in writer.chunks(index, part)):
                yield events
    if events := b"".join(writer.finish()):
        yield events
