"""A small HTTP server for answers that no edgespec server gives: what a test says, byte by byte."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

Reply = Callable[[socket.socket, bytes], None]
"""Answers the request with this body, on a connection that is closed afterwards."""


@dataclass
class OtherServer:
    """`heads` and `bodies` are those of the requests for answers so far; `left` is set when a client has closed one."""

    url: str
    heads: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)


@contextmanager
def other_server(reply: Reply, models: Any = ()) -> Iterator[OtherServer]:
    """A server that answers each POST by `reply`, and lists `models`."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = OtherServer(f"http://127.0.0.1:{listener.getsockname()[1]}/v1")

    def serve(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            head = b"".join(iter(file.readline, b"\r\n")).decode()
            fields = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:])
            body = file.read(int(fields.get("content-length", 0)))
            if head.startswith("GET"):
                send(connection, json.dumps({"object": "list", "data": list(models)}))
                return
            server.heads.append(head)
            server.bodies.append(json.loads(body))
            try:
                reply(connection, body)
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(20)
                connection.recv(1)
            except OSError:
                server.left.set()

    def accept() -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def send(
    connection: socket.socket, text: str, status: str = "200 OK", kind: str = "application/json", **headers: str
) -> None:
    """A whole response."""
    data = text.encode()
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n{more}connection: close\r\n\r\n"
    )
    connection.sendall(head.encode() + data)


def begin_stream(connection: socket.socket) -> None:
    """The head of a stream, which the end of the connection ends."""
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")


def send_event(connection: socket.socket, event: object) -> None:
    data = event if isinstance(event, str) else json.dumps(event)
    connection.sendall(f"data: {data}\n\n".encode())


def delta(reason: str | None = None, **fields: Any) -> dict[str, Any]:
    """An event with one choice."""
    return {"id": "x", "model": "there", "choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}
