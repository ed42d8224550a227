import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from edgespec.errors import InvalidRequest
from edgespec.server import http
from edgespec.server.http import EventStream, format_event

KEEP_ALIVE = EventStream.comment("keep-alive")
FAULT = InvalidRequest("no.", hint="Change it.")


class Client:
    """Takes the messages of a response, and never leaves."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.has_comment = asyncio.Event()
        self.has_status = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert not self.status
            self.status = message["status"]
            self.has_status.set()
            await asyncio.sleep(0)
        else:
            self.body += message["body"]
        if KEEP_ALIVE in self.body:
            self.has_comment.set()

    async def run(self, events: AsyncGenerator[bytes, None]) -> None:
        await EventStream("/v1/completions", events, format_event)({"type": "http"}, self.receive, self.send)


def test_a_silence_has_a_comment(monkeypatch):
    monkeypatch.setattr(http, "_SILENCE_S", 0.01)

    async def run() -> Client:
        client = Client()

        async def events():
            yield b"data: 1\n\n"
            await client.has_comment.wait()
            yield b"data: 2\n\n"

        await client.run(events())
        return client

    body = asyncio.run(run()).body
    assert body.replace(KEEP_ALIVE, b"") == b"data: 1\n\ndata: 2\n\n"


def test_a_failure_is_raised_or_the_last_event():
    async def run(*first: bytes) -> Client:
        async def events():
            for event in first:
                yield event
            raise FAULT

        client = Client()
        await client.run(events())
        return client

    with pytest.raises(InvalidRequest, match="no"):
        asyncio.run(run())
    late = asyncio.run(run(b"data: 1\n\n"))
    assert late.status == 200 and late.body.startswith(b'data: 1\n\ndata: {"error":')


def test_a_server_that_stops_ends_the_stream_with_an_error_event():
    async def run() -> Client:
        client, has_begun = Client(), asyncio.Event()

        async def events():
            yield b"data: 1\n\n"
            has_begun.set()
            await asyncio.Event().wait()

        response = asyncio.create_task(client.run(events()))
        await has_begun.wait()
        response.cancel()
        await response
        return client

    assert b"shutting down" in asyncio.run(run()).body.removeprefix(b"data: 1\n\n")
