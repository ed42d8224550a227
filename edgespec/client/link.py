"""The messages between an engine process and its client, and the client's end of their pipe."""

from __future__ import annotations

import pickle
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

from edgespec.engine.model_info import ModelInfo

_TICK_S = 0.5


class Link:
    """One end of the pipe between this process and an engine process. `send` from any thread, `receive` from one.

    silent_s  seconds for which the process has said nothing, since its first message. It counts steps in which this
              process has waited, so that time in which both processes are stopped does not count
    """

    def __init__(self, connection: Connection, max_silence_s: float) -> None:
        self.silent_s = 0.0
        self._connection = connection
        self._max_silence_s = max_silence_s
        self._has_spoken = False
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="edgespec-link", daemon=True)
        self._sender.start()

    def send(self, message: Any) -> None:
        """Queue a message and return at once: a process that is stopped does not read, and a pipe holds little. Raises
        PicklingError.
        """
        self._outbox.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def receive(self) -> Any:
        """The next message. Raises TimeoutError after a silence, EOFError or OSError once the process has ended."""
        while not self._connection.poll(_TICK_S):
            self.silent_s += _TICK_S * self._has_spoken
            if self.silent_s >= self._max_silence_s:
                raise TimeoutError
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


class Call(NamedTuple):
    """Call `method` of the EngineClient; its stream is number `number`. Without a method: cancel that stream.

    `arguments` is a pickled tuple: values of classes that a script defines cannot be read in another process.
    """

    number: int
    method: str = ""
    arguments: bytes = b""
    has_reporter: bool = False


class Report(NamedTuple):
    """An event of a stream that is a call of its Reporter."""

    method: str
    arguments: tuple[Any, ...]


class Update(NamedTuple):
    """New events of streams by their numbers, and perhaps the end of one. An empty one is a sign of life: the thread
    that owns the models goes on.

    ended       number of the stream that has ended
    model_info  the engine's at that time
    """

    events: dict[int, list[Any]]
    ended: int | None = None
    error: BaseException | None = None
    model_info: ModelInfo | None = None
