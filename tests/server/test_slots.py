"""The queue of a model: order, limit, exclusive access, cancellation at any moment, and turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.options import LoadOptions
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import Finished, Request
from edgespec.engine.model_info import ModelInfo
from edgespec.models.load_config import LoadConfig
from edgespec.server.http import HttpError, Policy
from edgespec.server.metrics import ServerMetrics
from edgespec.server.models import LocalModel, Models, generate_parts
from edgespec.server.slots import FairLimiter, ModelSlot


@given(
    max_concurrency=st.integers(1, 4),
    callers=st.lists(
        st.tuples(st.sampled_from(["caller", "alone"]), st.integers(0, 3), st.integers(0, 5)),
        min_size=1,
        max_size=25,
    ),
)
@settings(max_examples=200, deadline=None)
def test_no_more_than_allowed_and_nobody_is_forgotten(
    max_concurrency: int, callers: list[tuple[str, int, int]]
) -> None:
    """Each takes a turn or wants it alone, stays for so many turns of the loop, and is cancelled after so many
    (0: not at all); afterwards it is empty, and lets in as many as ever.
    """

    async def main() -> None:
        limiter = FairLimiter()
        limiter.resize(max_concurrency)
        inside: list[str] = []

        async def caller(kind: str, stays: int) -> None:
            await limiter.enter(exclusive=kind == "alone")
            try:
                await stay(kind, stays)
            finally:
                limiter.leave()

        async def stay(kind: str, stays: int) -> None:
            inside.append(kind)
            try:
                assert inside == ["alone"] or ("alone" not in inside and inside.count("caller") <= max_concurrency)
                for _ in range(stays):
                    await asyncio.sleep(0)
            finally:
                inside.remove(kind)

        tasks = []
        for kind, stays, patience in callers:
            tasks.append(asyncio.create_task(caller(kind, stays)))
            for _ in range(patience):
                await asyncio.sleep(0)
            if patience:
                tasks[-1].cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError), result
        assert (limiter.active, limiter.waiting, limiter.is_full) == (0, 0, False)
        for _ in range(max_concurrency):
            await asyncio.wait_for(limiter.enter(), 5)
        assert limiter.is_full

    asyncio.run(main())


@pytest.mark.parametrize("max_concurrency", [1, 3])
def test_first_come_first_served(max_concurrency: int) -> None:
    async def main() -> None:
        limiter = FairLimiter()
        limiter.resize(max_concurrency)
        order: list[int] = []

        async def caller(who: int) -> None:
            await limiter.enter()
            order.append(who)
            await asyncio.sleep(0)
            limiter.leave()

        await asyncio.gather(*(caller(who) for who in range(12)))
        assert order == list(range(12))

    asyncio.run(main())


def test_it_may_be_widened_while_others_wait() -> None:
    async def main() -> None:
        limiter = FairLimiter()
        await limiter.enter()
        waiting = [asyncio.create_task(limiter.enter()) for _ in range(3)]
        await asyncio.sleep(0)
        assert (limiter.active, limiter.waiting) == (1, 3)
        limiter.resize(3)
        await asyncio.sleep(0)
        assert (limiter.active, limiter.waiting) == (3, 1)
        limiter.leave()
        await asyncio.gather(*waiting)

    asyncio.run(main())


def test_the_next_answer_to_a_call_is_not_refused() -> None:
    """As of a call with n = 2, whose first answer would be lost."""

    async def main() -> None:
        slot = ModelSlot("m", LoadConfig(), Policy(max_queue=0), ServerMetrics())
        order = []

        async def next_answer() -> None:
            async with slot.turn(is_new=False):
                order.append("next")

        async with slot.turn():
            with pytest.raises(HttpError):
                async with slot.turn():
                    pass
            again = asyncio.create_task(next_answer())
            await asyncio.sleep(0)
            order.append("first")
        await asyncio.wait_for(again, 5)
        assert order == ["first", "next"]

    asyncio.run(main())


def test_a_visitor_waits_for_nobody_and_unloading_waits_for_it() -> None:
    async def main() -> None:
        slot = ModelSlot("m", LoadConfig(), Policy(), ServerMetrics())
        async with slot.turn(), slot.visit():
            assert slot.limiter.active == 1
        async with slot.visit():
            unloading = asyncio.create_task(slot.unload())
            await asyncio.sleep(0)
            assert slot.limiter.is_exclusive and not unloading.done() and slot.is_busy
        await asyncio.wait_for(unloading, 5)

    asyncio.run(main())


TOY = LoadConfig(model="tree", backend="toy", load=LoadOptions(context_size=4096))
REQUEST = Request("hello", SamplingParams(temperature=0.0, logit_bias=((256, -1000.0),)), 40, seed=1)


def test_the_turn_ends_with_the_engine_and_not_with_the_reader() -> None:
    async def main() -> None:
        models = Models({"tree": LocalModel(TOY)}, Policy(), ServerMetrics())
        slot = models.slots["tree"]

        async def answer(_model_info: ModelInfo | None, _copy: int) -> AsyncGenerator[Any, None]:
            async for batch in slot.stream(REQUEST):
                yield batch

        parts = generate_parts(models, slot, [answer], 1)
        _, events = await anext(parts)
        while slot.limiter.active:  # nothing more is read
            await asyncio.sleep(0.01)
        events += [event async for _, batch in parts for event in batch]
        assert isinstance(events[-1], Finished) and len(events[-1].tokens) == 40
        await models.close()

    asyncio.run(asyncio.wait_for(main(), 20))
