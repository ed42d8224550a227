"""FairLimiter: order, limit, exclusive access, and cancellation at any moment."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.planner.plan import LoadConfig
from edgespec.server.limiter import FairLimiter
from edgespec.server.metrics import ServerMetrics
from edgespec.server.model_slot import Busy, ModelSlot, Policy


@given(
    max_concurrency=st.integers(1, 4),
    callers=st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=25),
)
@settings(max_examples=200, deadline=None)
def test_no_more_than_allowed_and_nobody_is_forgotten(
    max_concurrency: int, callers: list[tuple[bool, int, int]]
) -> None:
    """Each caller wants it `alone` or not, stays for so many turns of the loop, and is cancelled after so many (0: not
    at all); afterwards it is empty, and lets in as many as ever.
    """

    async def main() -> None:
        limiter = FairLimiter()
        limiter.max_concurrency = max_concurrency
        inside: list[bool] = []

        async def caller(alone: bool, stays: int) -> None:
            if alone:
                async with limiter.exclusive():
                    await stay(True, stays)
                return
            await limiter.enter()
            try:
                await stay(False, stays)
            finally:
                limiter.leave()

        async def stay(alone: bool, stays: int) -> None:
            inside.append(alone)
            try:
                assert inside == [True] or (not any(inside) and len(inside) <= max_concurrency)
                for _ in range(stays):
                    await asyncio.sleep(0)
            finally:
                inside.remove(alone)

        tasks = []
        for alone, stays, patience in callers:
            tasks.append(asyncio.create_task(caller(alone, stays)))
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
        limiter.max_concurrency = max_concurrency
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
        limiter.max_concurrency = 3
        await asyncio.sleep(0)
        assert (limiter.active, limiter.waiting) == (3, 1)
        limiter.leave()
        await asyncio.gather(*waiting)

    asyncio.run(main())


def test_the_next_answer_to_a_call_is_not_refused() -> None:
    """As of a call with n = 2, whose first answer would be lost."""

    async def main() -> None:
        slot = ModelSlot("m", LoadConfig(), Policy(max_queue=0), ServerMetrics())
        await slot.enter()
        with pytest.raises(Busy):
            await slot.enter()
        again = asyncio.create_task(slot.enter(is_new=False))
        await asyncio.sleep(0)
        assert not again.done()
        slot.leave()
        await again
        slot.leave()

    asyncio.run(main())
