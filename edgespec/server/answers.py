"""The answers to one request, which run at once as far as the model has turns for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from edgespec.engine.events import Request
from edgespec.server.fields import compute
from edgespec.server.models import AnySlot, Models
from edgespec.server.slots import Answer, ModelSlot, Turn
from edgespec.service.generation_spec import GenerationSpec
from edgespec.service.response import Part, ResponseStream, Started, merge_deltas


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


def local_answers(slot: ModelSlot, specs: Sequence[GenerationSpec], body_bytes: int) -> list[Answer]:
    """The answers of a model of this machine. `body_bytes` is the size of the request's body."""
    return [partial(_generate, slot, spec, body_bytes) for spec in specs]


async def _generate(
    slot: ModelSlot, spec: GenerationSpec, body_bytes: int, turn: Turn, copy: int
) -> AsyncGenerator[list[Part], None]:
    model_info = turn.model_info
    assert model_info is not None

    def prepare() -> tuple[Request, ResponseStream]:
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
