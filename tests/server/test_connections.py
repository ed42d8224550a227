"""Connections that send nothing, or that are too many."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from time import sleep

import httpx

from tests.server.serving import TOY, serving

DESCRIPTORS = 128  # of which 32 are for connections, 16 of them for one address


def test_connections_are_bounded(tmp_path: Path) -> None:
    with serving(tmp_path, *TOY, descriptors=DESCRIPTORS) as server, ExitStack() as stack:
        address = ("127.0.0.1", httpx.URL(server.url).port or 0)

        def connect(source: str = "") -> socket.socket:
            return stack.enter_context(socket.create_connection(address, 30, (source, 0)))

        silent, half = connect(), connect()
        half.sendall(b"GET /health HTTP/1.1\r\nhost: local")
        others = [connect() for _ in range(14)]
        for _ in range(200):
            with socket.create_connection(address, 30) as refused:
                answer = refused.recv(1000).decode()
                assert answer.startswith("HTTP/1.1 503 ") and "too many connections" in answer
        if sys.platform == "linux":  # has all of 127/8
            other = connect("127.0.0.2")
            other.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert other.recv(1000).startswith(b"HTTP/1.1 200 ")
        for each in others:
            each.close()
        while httpx.get(f"{server.url}/health").status_code != 200:
            sleep(0.05)
        assert server.ask("tree", max_tokens=1).status_code == 200
        with connect() as leaves:
            leaves.sendall(b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{")
        for each in (silent, half):
            assert each.recv(1000).startswith(b"HTTP/1.1 408 ")
            while each.recv(1000):
                pass
        assert len(server.log) < 5, server.log
