"""Messages between rank 0 and the other ranks: JSON lines over TCP."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any, NoReturn

from edgespec.cancel import check_cancelled
from edgespec.errors import BackendError, reason_of
from edgespec.machines.ranks import ADDRESS, RankAddress, Ranks
from edgespec.sockets import keep_alive

Message = dict[str, Any]
MEET_S = 60.0
"""Seconds for which rank 0 and the others wait for each other."""

_DISMISS_S = 5.0
_TICK_S = 0.1
_has_led = False  # whether this process has met the other ranks, which end with it
_AGAIN = "Start all ranks again."


class Link:
    """One connection. A thread reads it: `on_message` gets each message, `on_end` is called at its end."""

    def __init__(
        self, connection: socket.socket, on_message: Callable[[Message], None], on_end: Callable[[], None]
    ) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection, idle_s=5, interval_s=2, probes=5)
        connection.settimeout(None)
        self._connection = connection
        self._on_message = on_message
        self._on_end = on_end
        threading.Thread(target=self._read, name="edgespec-ranks", daemon=True).start()

    def send(self, data: bytes) -> None:
        """Send a message. If the other end is gone, nothing is raised: `on_end` reports it."""
        with suppress(OSError):
            self._connection.sendall(data)

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self) -> None:
        with suppress(OSError, ValueError, RecursionError), self._connection.makefile("rb") as lines:
            for line in lines:
                self._on_message(json.loads(line))
        self._on_end()


class Leader:
    """Rank 0's connections to all other ranks. A rank that ends by itself ends this process, with one sentence."""

    def __init__(self, address: RankAddress, versions: dict[str, str]) -> None:
        """Waits for the other ranks. Raises BackendError if one does not come or has other versions, Cancelled."""
        global _has_led
        self.ranks = address.ranks
        self._replies: SimpleQueue[tuple[int, Message]] = SimpleQueue()
        self._links: dict[int, Link] = {}
        self._asked: set[int] = set()
        self._is_closed = False
        try:
            self._meet(address.server, versions)
            _has_led = True
        except BaseException:
            self.close()
            raise

    def tell(self, do: str, **arguments: Any) -> None:
        """Send every rank what it has to do. Raises BackendError if they are no longer there."""
        if self._is_closed:
            raise BackendError("the ranks are out of step.", hint=_AGAIN)
        data = _encode({"do": do, **arguments})
        for link in self._links.values():
            link.send(data)

    def ask(self, do: str, **arguments: Any) -> None:
        """Send every rank an operation that it answers; `gather` waits for the answers. Raises as `tell` does."""
        self.tell(do, **arguments)
        self._asked = set(self._links)

    def gather(self) -> None:
        """Wait until all that were asked have answered. Raises the BackendError that one reports, and Cancelled."""
        failures = []
        while self._asked:
            check_cancelled()
            with suppress(Empty):
                rank, reply = self._replies.get(timeout=_TICK_S)
                self._asked.discard(rank)
                if error := reply.get("error"):
                    failures.append(BackendError(f"rank {rank}: {error}", hint=str(reply.get("hint"))))
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Close the connections. The other ranks start anew, and wait for another process of rank 0."""
        self._is_closed = True
        for link in self._links.values():
            link.close()

    def _meet(self, server: socket.socket, versions: dict[str, str]) -> None:
        end_s = monotonic() + MEET_S
        server.settimeout(_TICK_S)
        while missing := set(range(1, self.ranks.size)) - set(self._links):
            check_cancelled()
            if monotonic() > end_s:
                raise BackendError(
                    f"rank {min(missing)} of {self.ranks.size} did not come to {self.ranks.address} in {MEET_S:.0f} s.",
                    hint=f"Only one model at a time runs on several ranks. {ADDRESS}=HOST:PORT names another address.",
                )
            with suppress(OSError):  # nobody came, or somebody else
                connection, _ = server.accept()
                hello = _read_hello(connection)
                rank = hello.get("rank")
                if rank not in missing or hello["size"] != self.ranks.size:
                    connection.close()
                    continue
                if hello["versions"] != versions:
                    raise BackendError(
                        f"rank {rank} has {_list(hello['versions'])}, and rank 0 {_list(versions)}.",
                        hint="Install the same versions on all machines.",
                    )
                self._links[rank] = Link(
                    connection,
                    lambda message, rank=rank: self._take(rank, message),  # type: ignore[misc]
                    lambda rank=rank: self._lose(rank),  # type: ignore[misc]
                )

    def _take(self, rank: int, message: Message) -> None:
        if message.get("is_fatal"):
            self._end(f"Rank {rank} of {self.ranks.size} has failed: {message.get('error')}")
        self._replies.put((rank, message))

    def _lose(self, rank: int) -> None:
        if not self._is_closed:
            self._end(f"Rank {rank} of {self.ranks.size} has ended")

    def _end(self, reason: str) -> NoReturn:
        """End this process: the thread that computes waits for that rank, perhaps for ever."""
        with suppress(OSError):
            sys.stderr.write(f"error: {reason.rstrip('.')}.\nhint: {_AGAIN}\n")
            sys.stderr.flush()
        os._exit(BackendError.exit_code)


class Follower:
    """Another rank's connection to rank 0."""

    def __init__(self, ranks: Ranks, versions: dict[str, str], wait_s: float, on_end: Callable[[], None]) -> None:
        """Tries to connect for `wait_s`. Raises BackendError if rank 0 is unreachable."""
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        end_s = monotonic() + wait_s
        while True:
            try:
                connection = socket.create_connection((ranks.host.strip("[]"), ranks.port), timeout=5)
                break
            except OSError as error:
                if monotonic() > end_s:
                    raise BackendError(
                        f"rank {ranks.rank} does not reach rank 0 at {ranks.address}: {reason_of(error)}.",
                        hint=f"{ADDRESS}=HOST:PORT names an address of rank 0 that all ranks reach.",
                    ) from error
                sleep(_TICK_S)
        self._link = Link(connection, self._inbox.put, on_end)
        self.reply(rank=ranks.rank, size=ranks.size, versions=versions)

    def receive(self) -> Message:
        return self._inbox.get()

    def peek(self, wait_s: float = 0.0) -> Message | None:
        """The next message; None if none comes in `wait_s`."""
        with suppress(Empty):
            return self._inbox.get(block=wait_s > 0, timeout=wait_s)
        return None

    def reply(self, **arguments: Any) -> None:
        self._link.send(_encode(arguments))


def dismiss(address: RankAddress) -> None:
    """End the other ranks, which may still be starting, with the command.

    If this process has met them, they end by themselves once it ends.
    """
    missing = set[int]() if _has_led else set(range(1, address.ranks.size))
    end_s = monotonic() + _DISMISS_S
    with address.server as server:
        while missing and (left_s := end_s - monotonic()) > 0:
            server.settimeout(left_s)
            with suppress(OSError):  # a stranger, or a rank that has ended meanwhile
                connection, _ = server.accept()
                with connection:
                    missing.discard(_read_hello(connection).get("rank"))


def is_reachable(ranks: Ranks) -> bool:
    """Whether rank 0's command is still there."""
    with suppress(OSError), socket.create_connection((ranks.host.strip("[]"), ranks.port), timeout=5):
        return True
    return False


def _encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _read_hello(connection: socket.socket) -> Message:
    """The greeting of a rank, after which nothing comes before an operation; empty for a stranger. Raises OSError."""
    connection.settimeout(1)
    with suppress(ValueError, RecursionError):
        hello = json.loads(connection.makefile("rb").readline(1000))
        if isinstance(hello, dict) and hello.keys() == {"rank", "size", "versions"} and type(hello["rank"]) is int:
            return hello
    return {}


def _list(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
