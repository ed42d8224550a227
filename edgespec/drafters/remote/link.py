"""The session of a drafter with `edgespec draft serve`.

A session that is lost is opened again in the background; meanwhile nobody waits for it.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import responses
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from edgespec.core.protocols import CheckCancelled
from edgespec.drafters.remote.messages import (
    MAX_GUESSES,
    PROTOCOL,
    Ask,
    BadMessage,
    Change,
    Drafted,
    Fault,
    Message,
    encode,
    pack_ids,
    split,
)
from edgespec.errors import reason_of

if TYPE_CHECKING:
    from edgespec.drafters.remote.drafter import RemoteDraft


# The responses of a draft server, read with asyncio.


MAX_HEAD = 2**16
"""Bytes of a response's head."""
MAX_BODY = 2**20
"""Bytes of a response that is not a session's."""
_MAX_CHUNK = 2**24


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """(status, header fields by lower-case name) of a response. Raises EOFError, ValueError."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError as error:
        raise ValueError("it ended the connection" if not error.partial else "it does not speak HTTP") from error
    except asyncio.LimitOverrunError as error:
        raise ValueError("it does not speak HTTP") from error
    first, *lines = head.split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
        raise ValueError("it does not speak HTTP")
    fields = (line.partition(":") for line in lines if line)
    return int(rest[:3]), {name.lower(): value.strip() for name, _, value in fields}


async def read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    length = headers.get("content-length", "")
    if not length.isdecimal() or int(length) > MAX_BODY:
        return b""
    return await reader.readexactly(int(length))


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    """The next part of a body in chunks; empty at its end. Raises EOFError, ValueError."""
    size = int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16)
    if not 0 <= size <= _MAX_CHUNK:
        raise ValueError("it does not speak HTTP")
    return (await reader.readexactly(size + 2))[:-2]


def read_refusal(status: int, body: bytes) -> str:
    """The reason that the server gives for a status, without its full stop."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, TypeError, KeyError, RecursionError):
        message = f"it says {status} {responses.get(status, '')}"
    return message.rstrip(". ")


def explain(error: BaseException) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    if isinstance(error, asyncio.IncompleteReadError | ConnectionResetError):
        return "it ended the connection"
    if isinstance(error, TimeoutError) and not str(error):
        return "it does not answer"
    return reason_of(error)


def explain_tls(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (error.reason or "it does not speak TLS").replace("_", " ").lower()


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
            self.draft.warn_once(
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


# The text that a target's machine and a draft server hold.


class Mirror:
    """A text that both sides hold."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._crc = 0

    def change_to(self, text: Sequence[int]) -> Change:
        """Make it `text`; returns what the other side has to change."""
        keep = len(self.tokens)
        if list(text[:keep]) != self.tokens:
            keep = next((i for i, (a, b) in enumerate(zip(self.tokens, text, strict=False)) if a != b), len(text))
        ids = list(text[keep:])
        self._replace(keep, ids)
        return Change(keep, ids, self._crc)

    def apply(self, change: Change) -> None:
        """Change it as the other side did. Raises BadMessage where the two then differ."""
        if change.keep > len(self.tokens):
            raise BadMessage(f"it keeps {change.keep} tokens of a text of {len(self.tokens)}")
        self._replace(change.keep, change.ids)
        if self._crc != change.crc:
            raise BadMessage("the two sides hold different texts")

    def _replace(self, keep: int, ids: Sequence[int]) -> None:
        if keep < len(self.tokens):
            del self.tokens[keep:]
            self._crc = zlib.crc32(pack_ids(self.tokens))
        self.tokens += ids
        self._crc = zlib.crc32(pack_ids(ids), self._crc)
