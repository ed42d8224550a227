"""This process' end of the pipe to an engine process: it sends without waiting, and notices silence."""

from __future__ import annotations

import pickle
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from select import POLLIN, POLLOUT, poll
from typing import Any

_TICK_S = 0.5
_SMALL = 2000  # bytes; a pipe that has room has room for as many, also on macOS


class Silence(Exception):
    """The other process has said nothing for too long."""


class Link:
    """Messages to and from the process at the other end. `send` from any thread, `receive` from one.

    silent_s  seconds for which the process has said nothing, since its first message. Counted in steps that this
              process has waited, so that none count in which both were stopped
    """

    def __init__(self, connection: Connection, max_silence_s: float) -> None:
        self.silent_s = 0.0
        self._connection = connection
        self._max_silence_s = max_silence_s
        self._has_spoken = False
        self._arrival, self._room = poll(), poll()
        self._arrival.register(connection.fileno(), POLLIN)
        self._room.register(connection.fileno(), POLLOUT)
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._n_queued = 0  # messages that the sender has not sent yet
        self._sending = threading.Lock()
        self._sender = threading.Thread(target=self._send_all, name="edgespec-link", daemon=True)
        self._sender.start()

    def send(self, message: Any) -> None:
        """Returns at once: a process that is stopped does not read, and a pipe holds little. Raises PicklingError."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            if self._n_queued or len(data) > _SMALL or not self._room.poll(0):
                self._n_queued += 1
                self._outbox.put(data)
                return
            with suppress(OSError):  # the process has ended; `receive` tells
                self._connection.send_bytes(data)

    def receive(self) -> Any:
        """The next message. Raises Silence, and EOFError or OSError once the process has ended."""
        while not self._arrival.poll(_TICK_S * 1000):
            self.silent_s += _TICK_S * self._has_spoken
            if self.silent_s >= self._max_silence_s:
                raise Silence
        message = pickle.loads(self._connection.recv_bytes())
        self.silent_s, self._has_spoken = 0.0, True
        return message

    def close(self) -> None:
        """Drop what has not been sent. The process has ended: what is being sent to it fails at once."""
        self._outbox.put(None)
        self._sender.join()
        self._connection.close()

    def _send_all(self) -> None:
        with suppress(OSError):  # the process has ended; `receive` tells
            while (data := self._outbox.get()) is not None:
                self._connection.send_bytes(data)
                with self._sending:
                    self._n_queued -= 1
