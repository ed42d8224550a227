"""The answers to one request, which run at once as far as the model has turns for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from edgespec.engine.events import Request
from edgespec.server.bodies import compute
from edgespec.server.model_slot import ModelSlot, Turn
from edgespec.server.models import Models
from edgespec.service.generation_spec import GenerationSpec
from edgespec.service.response import Part, ResponseStream, Started, merge_deltas


async def generate_parts(
    models: Models, name: str, specs: Sequence[GenerationSpec], copies: int, body_bytes: int
) -> AsyncGenerator[tuple[int, list[Part]], None]:
    """The parts of `copies` answers to each of `specs`, in batches of one answer with its index. The parts of one come
    in order.

    `body_bytes` is the size of the request's body. Raises any EdgespecError. It ends all the answers.
    """
    slot = models.choose(name)
    if len(specs) == copies == 1:
        async with aclosing(_generate(slot, await models.enter(slot), specs[0], 0, body_bytes)) as batches:
            async for parts in batches:
                yield 0, parts
        return
    answers = _Answers(models, slot, specs, copies, body_bytes)
    work = asyncio.create_task(answers.run())
    work.add_done_callback(lambda _: answers.found.put_nowait(None))
    try:
        while (found := await answers.found.get()) is not None:
            yield found
        await work
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


@dataclass(slots=True)
class _Answers:
    """Several answers to one request. `found` gets their parts, in batches, with the index of the answer."""

    models: Models
    slot: ModelSlot
    specs: Sequence[GenerationSpec]
    copies: int
    body_bytes: int
    found: asyncio.Queue[tuple[int, list[Part]] | None] = field(default_factory=asyncio.Queue)

    async def run(self) -> None:
        """Each asks for its turn after the one before has got it, so the request never has two places in the queue.

        Another answer to the same prompt begins when the first has read it: it finds the prompt in that one's cache.
        """
        are_read = [asyncio.Event() for _ in self.specs]
        try:
            async with asyncio.TaskGroup() as group:
                for copy in range(self.copies):
                    for number, spec in enumerate(self.specs):
                        if copy:
                            await are_read[number].wait()
                        has_turn = asyncio.Event()
                        index = number * self.copies + copy
                        group.create_task(self._run_one(index, spec, copy, has_turn, are_read[number]))
                        await has_turn.wait()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run_one(
        self, index: int, spec: GenerationSpec, copy: int, has_turn: asyncio.Event, is_read: asyncio.Event
    ) -> None:
        turn = await self.models.enter(self.slot, is_new=index == 0)
        has_turn.set()
        async with aclosing(_generate(self.slot, turn, spec, copy, self.body_bytes)) as batches:
            async for parts in batches:
                self.found.put_nowait((index, parts))
                if any(not isinstance(part, Started) for part in parts):
                    is_read.set()


async def _generate(
    slot: ModelSlot, turn: Turn, spec: GenerationSpec, copy: int, body_bytes: int
) -> AsyncGenerator[list[Part], None]:
    """The parts of one answer, in batches. The turn ends with it."""
    model_info = turn.model_info

    def prepare() -> tuple[Request, ResponseStream]:
        request = spec.build_request(model_info, token_limit=model_info.context_size, copy=copy)
        return request, spec.make_response(model_info, model_info.plain_speed, request.grammar)

    try:
        request, response = await compute(body_bytes, prepare)
        speculation = spec.draft_length.apply(model_info.speculation)
    except BaseException:
        slot.leave()
        raise
    async with slot.stream(request, turn.ends_s, speculation) as batches:  # which ends the turn
        async for batch in batches:
            yield merge_deltas([part for event in batch for part in response.parts(event)])
