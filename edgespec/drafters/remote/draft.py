"""A draft on another machine: its address, and what its server, `edgespec draft serve`, says of it."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from http.client import responses
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from edgespec.core.protocols import CheckCancelled
from edgespec.drafters.remote.http import MAX_HEAD, explain, explain_tls, read_body, read_head
from edgespec.drafters.remote.link import CONNECT_S, Link, Patience
from edgespec.drafters.remote.messages import MAX_GUESSES, PATH, PROTOCOL
from edgespec.errors import DraftRefused, InvalidRequest

KEY_VARIABLE = "EDGESPEC_DRAFT_KEY"
DEFAULT_PORT = 7438

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Address:
    """Of a draft server; `model` is the name that its draft must have, "" for any."""

    scheme: str
    host: str
    port: int
    model: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}" + (f"/{self.model}" if self.model else "")


@dataclass(frozen=True, slots=True)
class Description:
    """What a server says of its draft; see `drafters.remote.messages`."""

    model: str
    tokenizer: str


def parse_address(text: str) -> Address:
    """'http://box:7438' or 'https://box:7438/NAME'. Raises InvalidRequest."""
    hint = f"Write --draft http://HOST:{DEFAULT_PORT}; a key belongs into {KEY_VARIABLE}."
    try:
        url = urlsplit(text)
        port = url.port or {"http": 80, "https": 443}[url.scheme]
    except (ValueError, KeyError) as error:
        raise InvalidRequest(f"'{text}' is not the address of a draft server.", hint=hint) from error
    if url.username is not None or url.password is not None:
        raise InvalidRequest("an address is no place for a key.", hint=hint)
    if not url.hostname or url.query or url.fragment:
        raise InvalidRequest(f"'{text}' is not the address of a draft server.", hint=hint)
    return Address(url.scheme, url.hostname, port, unquote(url.path.strip("/")))


class RemoteDraft:
    """A draft on another machine, and the sessions that drafters have opened there."""

    def __init__(
        self, address: Address, key: str | None = None, patience: Patience | None = None, *, guesses: int = MAX_GUESSES
    ) -> None:
        """Asks for its description. `key`: None for the one of the environment. `guesses`: see `messages`; without them
        each draft costs a round trip. Raises DraftRefused.
        """
        self.patience = patience or Patience()
        self.guesses = guesses
        self.address = address
        self._key = os.environ.get(KEY_VARIABLE, "") if key is None else key
        self._tls = ssl.create_default_context() if address.scheme == "https" else None
        self._notices: deque[str] = deque()
        self._told: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="edgespec-remote", daemon=True)
        self._thread.start()
        try:
            self.description = self._run(self._describe())
        except BaseException:
            self.close()
            raise

    def open_link(self, vocab_size: int, check: CheckCancelled) -> Link:
        """A session for one drafter, which polls `check` while it waits. `vocab_size` is the target's."""
        return Link(self, vocab_size, check)

    def take_notices(self) -> list[str]:
        """Sentences for the user that were not taken yet, each once."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def tell(self, kind: str, text: str) -> None:
        """Keep a notice, unless there was one of this kind."""
        if kind not in self._told:
            self._told.add(kind)
            self._notices.append(text)

    def start(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Run `work` on the thread of the I/O."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call `function` soon on the thread of the I/O."""
        with suppress(RuntimeError):  # the draft was closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """End the sessions and the thread."""
        if self._thread.is_alive():
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(CONNECT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CONNECT_S)
            self._loop.close()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises OSError, which TLS errors are too."""
        return await asyncio.open_connection(
            self.address.host, self.address.port, ssl=self._tls, limit=MAX_HEAD, happy_eyeballs_delay=0.25
        )

    def write_head(self, writer: asyncio.StreamWriter, method: str, query: str, *lines: str) -> None:
        key = [f"Authorization: Bearer {self._key}"] if self._key else []
        host = str(Address(self.address.scheme, self.address.host, self.address.port)).partition("://")[2]
        head = [f"{method} {PATH}{query} HTTP/1.1", f"Host: {host}", "User-Agent: edgespec", *key, *lines]
        writer.write("\r\n".join([*head, "", ""]).encode("latin-1", "replace"))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _describe(self) -> Description:
        """Raises DraftRefused."""
        address = self.address
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await self.connect()
                try:
                    self.write_head(writer, "GET", "", "Connection: close")
                    status, headers = await read_head(reader)
                    body = await read_body(reader, headers)
                finally:
                    writer.close()
        except TimeoutError as error:
            raise DraftRefused(
                f"the draft server at {address} did not answer within {CONNECT_S:.0f} seconds.",
                hint="Check the address, and whether `edgespec draft serve` runs there.",
            ) from error
        except ssl.SSLError as error:
            raise DraftRefused(
                f"there is no trusted TLS at {address}: {explain_tls(error)}.",
                hint="Check the address, or name the authority's certificate in SSL_CERT_FILE.",
            ) from error
        except (OSError, EOFError, ValueError) as error:
            raise DraftRefused(
                f"no draft server answers at {address}: {explain(error)}.",
                hint="Start it there: edgespec draft serve [MODEL]",
            ) from error
        return self._check(status, body)

    def _check(self, status: int, body: bytes) -> Description:
        """Raises DraftRefused."""
        address = self.address
        if status == 401:
            problem = "refuses this key" if self._key else "wants a key"
            raise DraftRefused(f"the draft server at {address} {problem}.", hint=f"Set {KEY_VARIABLE} to its key.")
        try:
            told = json.loads(body) if status == 200 else {}
            protocol, found = told["protocol"], Description(str(told["model"]), str(told["tokenizer"]))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            what = "" if status == 200 else f" (it says {status} {responses.get(status, '')})".replace(" )", ")")
            raise DraftRefused(
                f"what answers at {address} is not `edgespec draft serve`{what}.",
                hint=f"Its port is {DEFAULT_PORT} unless it was started with another.",
            ) from error
        if protocol != PROTOCOL:
            raise DraftRefused(
                f"the draft server at {address} speaks version {protocol} of the protocol, and this edgespec "
                f"version {PROTOCOL}.",
                hint="Install the same version of edgespec on both machines.",
            )
        if address.model and address.model != found.model:
            raise DraftRefused(
                f"the draft server at {address} serves {found.model}, not {address.model}.",
                hint="Leave the name out, or name the served model.",
            )
        return found


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
