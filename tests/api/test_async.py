"""The same for asyncio: the event loop is never blocked, and tasks share a model."""

from __future__ import annotations

import asyncio

import pytest

import edgespec

PROMPT = "def read_lines(path):"


def test_generate_stream_and_chat(model: edgespec.Model) -> None:
    expected = model.generate(PROMPT, max_tokens=32, temperature=0)

    async def run() -> None:
        loading = edgespec.load_async(threads=1, draft="ngram", draft_max=4, exact=True, ctx=1024, parallel=2)
        async with await loading as loaded:
            texts = await asyncio.gather(
                loaded.generate(PROMPT, max_tokens=32, temperature=0), loaded.chat(PROMPT, max_tokens=32, temperature=0)
            )
            assert [reply.tokens for reply in texts] == [expected.tokens] * 2
            assert loaded.stats in [reply.stats for reply in texts]
            stream = loaded.stream(PROMPT, max_tokens=32, temperature=0)
            assert "".join([piece.text async for piece in stream]) == stream.reply.text == expected.text
            async for _ in loaded.stream(PROMPT, max_tokens=500):
                break
            left = loaded.stream(PROMPT, max_tokens=500)
            await anext(left)
            await left.aclose()
            with pytest.raises(edgespec.InvalidRequest):
                await left.read()
            assert len((await loaded.generate(PROMPT, max_tokens=2)).tokens) <= 2

    asyncio.run(run())


def test_errors_are_raised_where_they_are_awaited() -> None:
    async def run() -> None:
        with pytest.raises(edgespec.UnknownModel):
            await edgespec.load_async("pyhton-6m")
        toy = await edgespec.load_async("linear", backend="toy")
        with pytest.raises(edgespec.InvalidRequest, match="empty"):
            await toy.generate("")
        stream = toy.stream("abc")
        await toy.close()
        with pytest.raises(edgespec.BackendError, match="closed"):
            await toy.generate("abc")
        with pytest.raises(edgespec.BackendError, match="closed"):
            await stream.read()

    asyncio.run(run())


def test_a_cancelled_task_cancels_its_generation() -> None:
    async def run() -> None:
        async with await edgespec.load_async("linear", backend="toy", draft="none", ctx=1_000_000) as loaded:
            # its text does not end before the cancel, whenever that comes
            task = asyncio.create_task(loaded.generate(PROMPT, max_tokens=900_000, logit_bias={256: -100}))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len((await loaded.generate(PROMPT, max_tokens=4)).tokens) <= 4

    asyncio.run(run())
