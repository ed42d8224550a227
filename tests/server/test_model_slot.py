"""A model slot: a turn lasts as long as the engine works, whoever reads the answer and however slowly."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from math import inf

import pytest

from edgespec.backends.options import LoadOptions
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import Finished, Request
from edgespec.planner.plan import LoadConfig
from edgespec.server.http import Policy
from edgespec.server.metrics import ServerMetrics
from edgespec.server.slots import ModelSlot

TOY = LoadConfig(model="tree", backend="toy", load=LoadOptions(context_size=4096))
REQUEST = Request("hello", SamplingParams(temperature=0.0, logit_bias=((256, -1000.0),)), 40, seed=1)


@pytest.fixture
def slot() -> Iterator[ModelSlot]:
    made = ModelSlot("toy", TOY, Policy(), ServerMetrics())
    yield made
    asyncio.run(made.close())


async def until_free(slot: ModelSlot) -> None:
    while slot.limiter.active:
        await asyncio.sleep(0.01)


def test_the_turn_ends_with_the_engine_and_not_with_the_reader(slot: ModelSlot) -> None:
    async def main() -> None:
        await slot.open()
        await slot.enter()
        async with slot.stream(REQUEST, inf) as batches:
            await asyncio.wait_for(until_free(slot), 10)  # nothing has been read
            events = [event async for batch in batches for event in batch]
        assert isinstance(events[-1], Finished) and len(events[-1].tokens) == 40
        assert slot.limiter.active == 0

    asyncio.run(main())


def test_a_reader_that_leaves_ends_the_turn(slot: ModelSlot) -> None:
    async def main() -> None:
        await slot.open()
        await slot.enter()
        async with slot.stream(REQUEST, inf) as batches:
            await anext(batches)
        await asyncio.wait_for(until_free(slot), 10)
        await slot.enter()
        async with slot.stream(REQUEST, inf) as batches:
            assert [event async for batch in batches for event in batch if isinstance(event, Finished)]

    asyncio.run(main())


def test_a_generation_that_cannot_start_gives_the_turn_back(slot: ModelSlot) -> None:
    async def main() -> None:
        await slot.open()
        await slot.enter()
        unsendable = Request("hello", variables={"tools": lambda: None})
        with pytest.raises(Exception, match="pickle"):
            async with slot.stream(unsendable, inf):
                pass
        assert slot.limiter.active == 0

    asyncio.run(main())
