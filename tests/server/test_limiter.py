"""FairLimiter: order, limit, exclusive access, and cancellation at any moment."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.planner.plan import LoadConfig
from edgespec.server.http import Busy, Policy
from edgespec.server.metrics import ServerMetrics
from edgespec.server.slots import FairLimiter, ModelSlot


@given(
    max_concurrency=st.integers(1, 4),
    callers=st.lists(
        st.tuples(st.sampled_from(["caller", "alone", "visitor"]), st.integers(0, 3), st.integers(0, 5)),
        min_size=1,
        max_size=25,
    ),
)
@settings(max_examples=200, deadline=None)
def test_no_more_than_allowed_and_nobody_is_forgotten(
    max_concurrency: int, callers: list[tuple[str, int, int]]
) -> None:
    """Each takes a turn, wants it alone or visits, stays for so many turns of the loop, and is cancelled after so many
    (0: not at all); afterwards it is empty, and lets in as many as ever.
    """

    async def main() -> None:
        limiter = FairLimiter()
        limiter.max_concurrency = max_concurrency
        inside: list[str] = []

        async def caller(kind: str, stays: int) -> None:
            if kind != "caller":
                async with limiter.exclusive() if kind == "alone" else limiter.visit():
                    await stay(kind, stays)
                return
            await limiter.enter()
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
        assert (limiter.active, limiter.waiting, limiter.visitors, limiter.is_full) == (0, 0, 0, False)
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


def test_a_visitor_does_not_wait_for_those_who_do() -> None:
    async def main() -> None:
        limiter = FairLimiter()
        await limiter.enter()
        waiting = asyncio.create_task(limiter.enter())
        alone = asyncio.create_task(limiter.exclusive().__aenter__())
        await asyncio.sleep(0)
        async with limiter.visit():
            limiter.leave()
            await waiting
            limiter.leave()
            await asyncio.sleep(0)
            assert not alone.done() and limiter.visitors == 1
        await asyncio.wait_for(alone, 5)

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
