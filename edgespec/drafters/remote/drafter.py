"""The drafter over a draft on another machine; `messages` has the protocol.

One unit of work asks the server once and proposes a tree of best tokens, or a drawn chain. While the target verifies,
the server guesses what will be emitted and drafts after that. Where a guess holds, the next draft is here already.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from http.client import responses
from statistics import median
from time import perf_counter
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np

from edgespec.core.drafter import Drafter, Outcome, TokenDraw
from edgespec.core.protocols import Budget, CheckCancelled, Round
from edgespec.core.sampling import SamplingParams
from edgespec.core.tree import DraftTree
from edgespec.drafters.remote.link import (
    CONNECT_S,
    MAX_HEAD,
    Link,
    Mirror,
    Patience,
    explain,
    explain_tls,
    read_body,
    read_head,
)
from edgespec.drafters.remote.messages import MAX_DEPTH, MAX_GUESSES, MAX_NODES, PATH, PROTOCOL, Ask, Begin, Drafted
from edgespec.errors import DraftRefused, InvalidRequest

_ROUNDS = 9  # latest rounds whose time counts
_MAX_UNTOLD = 32  # tokens that the server may lack while it is not asked
_POLL_S = 0.05  # between two looks whether the generation was cancelled


class RemoteDrafter(Drafter):
    """Proposes what a draft server drafts. Where that is slow or gone, it proposes nothing and waits for little."""

    name = "remote"
    block_size = MAX_DEPTH
    runs_ahead = True

    def __init__(self, link: Link, vocab_size: int) -> None:
        """Closes `link` when it is closed. `vocab_size` is the target's."""
        self._link = link
        self._vocab_size = vocab_size
        self._clock = RoundClock(link.draft.patience)
        self._sampling: SamplingParams | None = None
        self._seed = 0
        self._epoch = 0  # of the connection that knows the mirror's text
        self._mirror = Mirror()
        self._number = 0  # of the last message
        self._late = 0  # number of an Ask without a reply, for which nobody waits any more
        self._told = 0  # number of the last Ask of depth 0
        self._announced: Sequence[int] = ()  # a text that a generation will start from

    def prefill_started(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        self.is_drawn = draw is not None
        self._sampling = draw.sampling if draw is not None else None
        self._seed = draw.spawn_seed() if draw is not None else 0
        self._announced = text
        self._start(text)

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        if text is not self._announced:
            self.prefill_started(text, draw)
        self._announced = ()
        self._clock.begin()

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        if self._link.epoch != self._epoch:
            self._start(text[:-1])
        if not self._epoch or self._is_late():
            return
        depth, nodes = min(limit.depth, MAX_DEPTH), min(max(limit.depth, limit.nodes), MAX_NODES)
        reach = 0.0 if self.is_drawn else limit.reach  # whether a drawn token comes in time must not depend on it
        cut = self._make_cut(text, depth, reach)
        found = self._link.find(cut)
        self._number += 1
        change = self._mirror.change_to(text)
        self._link.ask(Ask(self._number, change, depth, nodes, reach, found is not None), self._epoch)
        if found is None and (found := self._wait(cut)) is None:
            self._late = self._number
        elif not found.tokens:
            return
        else:
            self._add(tree, found, depth)
        self._clock.leave()
        yield  # where nothing came, the unit has cost its time all the same

    def observe(self, done: Round) -> Sequence[Outcome]:
        self._clock.arrive()
        if self._link.epoch != self._epoch:
            self._start(done.text[:-1])
        elif self._epoch and len(done.text) - len(self._mirror.tokens) > _MAX_UNTOLD and self._has_come(self._told):
            self._told = self._number = self._number + 1
            self._link.send(Ask(self._number, self._mirror.change_to(done.text), 0, 0), self._epoch)
        return ()

    def close(self) -> None:
        self._link.close()

    def _start(self, text: Sequence[int]) -> None:
        """Send the text if there is a connection; a new one knows nothing of it."""
        self._late = self._told = 0
        if self._link.epoch != self._epoch:
            self._epoch, self._mirror = self._link.epoch, Mirror()
        if self._epoch:
            self._number += 1
            message = Begin(self._number, self._mirror.change_to(text), self._sampling, self._seed)
            self._link.send(message, self._epoch)

    def _is_late(self) -> bool:
        """Whether a reply is still to come that was not waited for."""
        if self._has_come(self._late):
            self._late = 0
        return self._late > 0

    def _has_come(self, number: int) -> bool:
        """Whether the server has said something of the message `number`, or of a later one; of 0 it has."""
        return not number or self._link.find(lambda each: each if each.number >= number else None) is not None

    def _make_cut(self, text: Sequence[int], depth: int, reach: float) -> Callable[[Drafted], Drafted | None]:
        """What a draft says after `text`: a reply to the next message, or what was made for the last one.

        What is known already counts if it is half as deep as what is asked for, or ends where it is improbable.
        """
        last, base = self._number, len(self._mirror.tokens)
        emitted = list(text[base:]) if list(text[:base]) == self._mirror.tokens else None

        def cut(draft: Drafted) -> Drafted | None:
            if draft.number > last:
                return draft if draft.number == last + 1 and not draft.is_guess else None
            if draft.number < last or emitted is None:
                return None
            found = draft.after(emitted)
            return found if found is not None and found.is_enough((depth + 1) // 2, reach) else None

        return cut

    def _wait(self, cut: Callable[[Drafted], Drafted | None]) -> Drafted | None:
        """The draft; None if it does not come in time. Raises Cancelled."""
        until = perf_counter() + self._clock.patience_s
        while (left := until - perf_counter()) > 0 and self._link.epoch == self._epoch:
            self._link.check()
            if (found := self._link.wait(cut, min(left, _POLL_S))) is not None:
                return found
        return None

    def _add(self, tree: DraftTree, found: Drafted, depth: int) -> None:
        """Raises ValueError for a draft that is no tree, and for tokens that the target does not have."""
        if not 0 <= min(found.tokens) <= max(found.tokens) < self._vocab_size:
            raise ValueError("the server proposed a token that the target does not have")
        nodes, depths = {-1: -1}, {-1: 0}
        for i, (token, parent) in enumerate(zip(found.tokens, found.parents, strict=True)):
            if parent not in depths:
                raise ValueError("the server sent a draft that is no tree")
            depths[i] = depths[parent] + 1
            if depths[i] > depth:
                continue
            q, confidence = None, found.confidences[i]
            if found.q is not None:
                ids, weights = found.q[i]
                q = np.zeros(self._vocab_size)
                q[ids] = weights / weights.sum(dtype=np.float64)
                confidence = float(q[token])
            nodes[i] = tree.add(nodes[parent], token, self.name, confidence, q)


class RoundClock:
    """How long the target's rounds take, and so how long one may wait for a draft."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._since_s = 0.0  # when a draft was handed over, or else the last round ended; 0 before the first
        self._rounds: deque[float] = deque(maxlen=_ROUNDS)

    def begin(self) -> None:
        self._since_s = 0.0

    def leave(self) -> None:
        """The target verifies from now on."""
        self._since_s = perf_counter()

    def arrive(self) -> None:
        """The target has verified."""
        now = perf_counter()
        if self._since_s:
            self._rounds.append(now - self._since_s)
        self._since_s = now

    @property
    def patience_s(self) -> float:
        """Seconds that a round may wait."""
        if not self._rounds:
            return self._patience.most_s
        return min(self._patience.most_s, max(self._patience.least_s, self._patience.steps * median(self._rounds)))


# A draft on another machine: its address, and what its server, `edgespec draft serve`, says of it.


KEY_VARIABLE = "EDGESPEC_DRAFT_KEY"
DEFAULT_PORT = 7438

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a draft server; `model` is the name that its draft must have, "" for any."""

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
            self.description = self.start(self._describe()).result()
        except BaseException:
            self.close()
            raise

    def open_link(self, vocab_size: int, check: CheckCancelled) -> Link:
        """A session for one drafter, which polls `check` while it waits. `vocab_size` is the target's."""
        return Link(self, vocab_size, check)

    def take_notices(self) -> list[str]:
        """Sentences for the user that were not taken yet, each once."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def warn_once(self, kind: str, text: str) -> None:
        """Keep a notice, unless there was one of this kind."""
        if kind not in self._told:
            self._told.add(kind)
            self._notices.append(text)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
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
                self.start(_cancel_all()).result(CONNECT_S)
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
