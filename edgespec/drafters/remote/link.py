"""The session of a drafter with `edgespec draft serve`.

A session that is lost is opened again in the background; meanwhile nobody waits for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from edgespec.core.protocols import CheckCancelled
from edgespec.drafters.remote.http import explain, read_body, read_chunk, read_head, read_refusal
from edgespec.drafters.remote.messages import (
    MAX_GUESSES,
    PROTOCOL,
    Ask,
    BadMessage,
    Drafted,
    Fault,
    Message,
    encode,
    split,
)

if TYPE_CHECKING:
    from edgespec.drafters.remote.draft import RemoteDraft

CONNECT_S = 5.0  # for a connection and the answer to its first request
_STALL_S = 10.0  # without a reply that is waited for, after which the connection is given up
_KEPT = 2 * MAX_GUESSES  # latest drafts
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.2, 10.0  # between two attempts to connect


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a round waits for a draft: `steps` times the time of the target's rounds, within limits in seconds.

    `most_s` also holds while that time is not known.
    """

    steps: float = 3.0
    least_s: float = 0.02
    most_s: float = 1.0


class Link:
    """One session of a draft server, as its drafter sees it.

    draft  what the session is one of
    epoch  0 while there is no connection; another number for each connection, which knows no text at first
    check  that of the generation that waits
    """

    def __init__(self, draft: RemoteDraft, vocab_size: int, check: CheckCancelled) -> None:
        """Waits a little for the connection, which is then kept open in the background."""
        self.epoch = 0
        self.check = check
        self.draft = draft
        self._n_connections = 0
        query = {"protocol": PROTOCOL, "tokenizer": draft.description.tokenizer, "vocab_size": vocab_size}
        query["guesses"] = draft.guesses
        self._query = f"?{urlencode(query)}"
        self._changed = threading.Condition(threading.RLock())
        self._drafts: list[Drafted] = []
        self._writer: asyncio.StreamWriter | None = None
        self._waits_since = 0.0  # for the reply to an Ask; 0 without one
        self._has_tried = False  # to connect
        self._work = draft.start(self._keep_open())
        with self._changed:
            self._changed.wait_for(lambda: self._has_tried, draft.patience.most_s)

    def send(self, message: Message, epoch: int) -> None:
        """Send a message, unless the connection is not that of `epoch` any more."""
        self.draft.call(self._write, encode(message), epoch)

    def ask(self, message: Ask, epoch: int) -> None:
        """`send`; forgets the drafts for earlier texts than the one before."""
        with self._changed:
            self._drafts = [each for each in self._drafts if each.number >= message.number - 1]
            self._waits_since = 0.0 if message.is_held else monotonic()
        self.send(message, epoch)

    def find(self, cut: Callable[[Drafted], Drafted | None]) -> Drafted | None:
        """The longest that `cut` makes of the drafts that have arrived."""
        with self._changed:
            found = [each for each in map(cut, self._drafts) if each is not None]
        return max(found, key=lambda each: len(each.tokens), default=None)

    def wait(self, cut: Callable[[Drafted], Drafted | None], seconds: float) -> Drafted | None:
        """`find`, once there is one; None if none arrives in time, or the connection is lost."""
        epoch = self.epoch
        with self._changed:
            self._changed.wait_for(lambda: self.epoch != epoch or self.find(cut) is not None, seconds)
            return self.find(cut)

    def close(self) -> None:
        """End the session. The draft stays open for others."""
        self._work.cancel()

    def _write(self, data: bytes, epoch: int) -> None:
        if self._writer is not None and epoch == self.epoch:
            self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def _keep_open(self) -> None:
        """Connect, and again whenever the connection is lost, until it is cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            kind, reason = "lost", "it ended the connection"
            try:
                await self._live()
                pause_s = _FIRST_PAUSE_S
            except _Refused as error:
                kind, reason = f"refused by {error.status}", str(error)
            except (OSError, EOFError, ValueError) as error:  # OSError includes TimeoutError
                reason = explain(error)
            finally:
                self._lose()
            self.draft.tell(
                kind,
                f"The drafter remote has no connection to {self.draft.address}: {reason}. "
                "Answers go on without it, and use it again when it is back.",
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    async def _live(self) -> None:
        """One connection, from its start to its end. Raises OSError, EOFError, ValueError."""
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await self.draft.connect()
        try:
            headers = ("Content-Type: application/octet-stream", "Transfer-Encoding: chunked")
            self.draft.write_head(writer, "POST", self._query, *headers)
            async with asyncio.timeout(CONNECT_S):
                status, fields = await read_head(reader)
                if status != 200 or fields.get("transfer-encoding", "").lower() != "chunked":
                    raise _Refused(status, read_refusal(status, await read_body(reader, fields)))
            with self._changed:
                self._writer, self._drafts, self._waits_since, self._has_tried = writer, [], 0.0, True
                self._n_connections += 1
                self.epoch = self._n_connections
                self._changed.notify_all()
            tasks = [asyncio.create_task(work) for work in (self._read(reader), self._watch())]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
        finally:
            writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        received = bytearray()
        while chunk := await read_chunk(reader):
            received += chunk
            for message in split(received):
                if isinstance(message, Fault):
                    raise ValueError(message.reason)
                if not isinstance(message, Drafted):
                    raise BadMessage("it sent a message that only clients send")
                with self._changed:
                    self._drafts = [*self._drafts[-_KEPT:], message]
                    if not message.is_guess:
                        self._waits_since = 0.0
                    self._changed.notify_all()

    async def _watch(self) -> None:
        """Raises TimeoutError where a reply does not come; a network that is gone tells nobody."""
        while not self._waits_since or monotonic() - self._waits_since < _STALL_S:
            await asyncio.sleep(1)
        raise TimeoutError(f"no reply has come for {_STALL_S:.0f} seconds")

    def _lose(self) -> None:
        with self._changed:
            self._writer, self.epoch, self._drafts, self._has_tried = None, 0, [], True
            self._changed.notify_all()


class _Refused(ValueError):
    """The server opens no session, and says why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
