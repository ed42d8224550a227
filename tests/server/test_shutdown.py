"""The end of the server: every caller is told in the words of its interface."""

from __future__ import annotations

import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from typing import Any

import httpx

from edgespec.cli.interrupts import INTERRUPTED
from tests.server.serving import ENDLESS, TOY, Server, serving

CHAT = "/v1/chat/completions"
MESSAGES: dict[str, Any] = {"model": "tree", "messages": [{"role": "user", "content": "x"}], **ENDLESS}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: MESSAGES,
    "/v1/completions": {"model": "tree", "prompt": "x"},
    "/v1/responses": {"model": "tree", "input": "x"},
    "/v1/messages": MESSAGES,
}


def test_every_caller_is_told(tmp_path: Path) -> None:
    """Those who wait for an answer, those whose stream has begun, and one whose body has not arrived."""
    with serving(tmp_path, *TOY, "--parallel", "2") as server, ThreadPoolExecutor(16) as pool:
        server.ask("tree", max_tokens=1)
        began = Semaphore(0)
        endless = [pool.submit(read_stream, server, CHAT, MESSAGES, began) for _ in range(2)]
        server.until("tree", answering=2)
        (engine,) = server.engines()
        engine.suspend()  # the first five seconds of silence bring the headers of the streams
        streams = [pool.submit(read_stream, server, path, body, began) for path, body in BODIES.items()]
        wholes = [pool.submit(server.post, path, json=body) for path, body in BODIES.items()]
        server.until("tree", waiting=8)
        for _ in (*endless, *streams):
            assert began.acquire(timeout=30)
        slow = socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0))
        slow.sendall(b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{")
        server.get("/health")  # it is read after the head before
        engine.resume()
        server.process.send_signal(signal.SIGINT)
        with slow, slow.makefile("rb") as answer:
            assert answer.readline() == b"HTTP/1.1 503 Service Unavailable\r\n"
        for call in wholes:
            response = call.result(30)
            assert response.status_code == 503 and is_told(response.json()), response.text
        for stream in (*endless, *streams):
            name, _, data = stream.result(30).strip().rpartition("\n\n")[2].rpartition("data: ")
            error = json.loads(data)
            assert is_told(error) and name == (f"event: {error['type']}\n" if "type" in error else ""), (name, data)
        assert server.process.wait(30) == INTERRUPTED
    lines = [line for line in server.log if " ERROR POST " in line and "the server is shutting down" in line]
    assert len(lines) == len(endless) + len(streams) + len(wholes) + 1, "".join(server.log)


def test_a_closed_terminal_ends_the_server_as_sigterm_does(tmp_path: Path) -> None:
    """SIGHUP: streams end with an event, and the program in order."""
    with serving(tmp_path, *TOY) as server, ThreadPoolExecutor(1) as pool:
        server.ask("tree", max_tokens=1)
        began = Semaphore(0)
        stream = pool.submit(read_stream, server, CHAT, MESSAGES, began)
        assert began.acquire(timeout=30)
        server.process.send_signal(signal.SIGHUP)
        assert is_told(json.loads(stream.result(30).strip().rpartition("data: ")[2]))
        assert server.process.wait(30) == 0


def is_told(body: dict[str, Any]) -> bool:
    error = body["response"]["error"] if body.get("type") == "response.failed" else body["error"]
    return error["message"] == "the server is shutting down."


def read_stream(server: Server, path: str, body: dict[str, Any], began: Semaphore) -> str:
    """A whole stream, which must end as HTTP says: httpx raises for one that is cut."""
    with httpx.stream("POST", f"{server.url}{path}", json={**body, "stream": True}, timeout=60) as response:
        text = ""
        for part in response.iter_text():
            if not text:
                began.release()
            text += part
    return text
