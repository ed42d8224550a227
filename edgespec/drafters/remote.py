"""A draft on another machine: the drafter, and its requests to `edgespec draft serve`.

`GET /v1/draft` describes the draft as JSON: `protocol`, `model`, `drafter`, `tokenizer` (the hash of
`registry.tokenizer_compat.hash_vocabulary`), `context_size`, `parallel` and `in_use`. `POST /v1/draft` asks for one
draft. Both are authenticated like every request of `edgespec serve`. The fields of the request are

protocol, tokenizer, vocab_size  those of the client; the last two are its target's
session                          a name for the cache that the server keeps for this client
keep, crc, ids                   the text: the first `keep` tokens of the last request's text, then `ids`. `crc` is the
                                 `checksum` of what is kept. A server without it refuses with status 412
depth, nodes, reach              of the draft, as in Budget
sampling, seed                   how tokens are drawn; without `sampling` the best tokens are proposed

The answer has a value for each token: `tokens`, `parents` (-1 is the root) and `confidences`, the probabilities by the
draft. `q` has the ids and the probabilities of the distribution that each token was drawn from, and is null for best
tokens. The probabilities are float32, so JSON keeps them exactly.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import ssl
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from time import perf_counter
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from edgespec.core.drafter import Drafter, Outcome, TokenDraw
from edgespec.core.protocols import Budget, CheckCancelled, Round
from edgespec.core.tree import DraftTree
from edgespec.errors import DraftRefused, InvalidRequest, reason_of

PROTOCOL = 2
PATH = "/v1/draft"
MAX_DEPTH = 16
"""Tokens on a path of a draft, at most."""
MAX_NODES = 63
KEY_VARIABLE = "EDGESPEC_DRAFT_KEY"
DEFAULT_PORT = 7438
_CHECKED = 64  # last tokens of what is kept that are compared
_CONNECT_S = 5.0  # for the description
_REPLY_S = 30.0  # for a draft, after which the connection is given up
_MAX_ANSWER = 2**24  # bytes
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.2, 10.0  # after a request that has failed
_PATIENCE = 3.0  # times the target's last round, that a round waits for a draft
_WAITS_S = (0.02, 1.0)  # limits of that
_POLL_S = 0.05  # between two looks whether the generation was cancelled


def checksum(kept: Sequence[int]) -> int:
    """A number that differs where client and server hold different texts; of the last tokens, since texts are long."""
    return zlib.crc32(np.asarray(kept[-_CHECKED:], "<i4").tobytes())


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
    """The draft of a server. Its drafters have connections of their own.

    model, tokenizer  what the server says of it
    """

    def __init__(self, address: Address, key: str | None = None, waits_s: tuple[float, float] = _WAITS_S) -> None:
        """Asks the server what it serves. Raises DraftRefused.

        `key`: None for the environment's. `waits_s`: how long a round waits, least and most.
        """
        self.address = address
        self.waits_s = waits_s
        self._key = os.environ.get(KEY_VARIABLE, "") if key is None else key
        self._tls = ssl.create_default_context() if address.scheme == "https" else None
        self._notices: deque[str] = deque()
        self._told: set[type[Exception]] = set()
        self.model, self.tokenizer = self._describe()

    def open_link(self, vocab_size: int, check: CheckCancelled) -> Link:
        """The connection of one drafter, which polls `check` while it waits. `vocab_size` is the target's."""
        return Link(self, vocab_size, check)

    def connect(self, timeout_s: float) -> HTTPConnection:
        """A connection, which is made by its first request."""
        if self._tls is None:
            return HTTPConnection(self.address.host, self.address.port, timeout=timeout_s)
        return HTTPSConnection(self.address.host, self.address.port, timeout=timeout_s, context=self._tls)

    def send(self, connection: HTTPConnection, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        """(status, body) of the answer to GET, or to POST with a `body`. Raises OSError, HTTPException, ValueError."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        if body is None:
            connection.request("GET", PATH, headers=headers)
        else:
            connection.request("POST", PATH, json.dumps(body), {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, response.read(_MAX_ANSWER)

    def warn_once(self, error: Exception) -> None:
        """Keep a notice for the user, the first time that the server is lost, and the first time that it refuses."""
        kind = ValueError if isinstance(error, ValueError) else OSError
        if kind not in self._told:
            self._told.add(kind)
            self._notices.append(
                f"The drafter remote has no drafts of {self.address}: {reason_of(error)}. "
                "Answers go on without it, and use it again when it is back."
            )

    def take_notices(self) -> list[str]:
        """Sentences for the user that were not taken yet, each once."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def close(self) -> None:
        """Nothing is open: drafters close their connections."""

    def _describe(self) -> tuple[str, str]:
        """(name, hash of the tokenizer) of the draft. Raises DraftRefused."""
        address, connection = self.address, self.connect(_CONNECT_S)
        try:
            status, body = self.send(connection)
        except (OSError, HTTPException, ValueError) as error:
            raise DraftRefused(
                f"no draft server answers at {address}: {reason_of(error)}.",
                hint="Start it there: edgespec draft serve [MODEL]",
            ) from error
        finally:
            connection.close()
        if status == 401:
            problem = "refuses this key" if self._key else "wants a key"
            raise DraftRefused(f"the draft server at {address} {problem}.", hint=f"Set {KEY_VARIABLE} to its key.")
        try:
            told = json.loads(body) if status == 200 else {}
            protocol, model, tokenizer = told["protocol"], str(told["model"]), str(told["tokenizer"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DraftRefused(
                f"what answers at {address} with status {status} is not `edgespec draft serve`.",
                hint=f"Its port is {DEFAULT_PORT} unless it was started with another.",
            ) from error
        if protocol != PROTOCOL:
            raise DraftRefused(
                f"the draft server at {address} speaks version {protocol} of the protocol, and this edgespec "
                f"version {PROTOCOL}.",
                hint="Install the same version of edgespec on both machines.",
            )
        if address.model not in ("", model):
            raise DraftRefused(
                f"the draft server at {address} serves {model}, not {address.model}.",
                hint="Leave the name out, or name the served model.",
            )
        return model, tokenizer


class Link:
    """The requests of one drafter, which a thread sends one after the other.

    is_lost  whether the last one has failed
    """

    def __init__(self, draft: RemoteDraft, vocab_size: int, check: CheckCancelled) -> None:
        self.check = check
        self.waits_s = draft.waits_s
        self.is_lost = False
        self._is_closed = False
        self._draft = draft
        self._thread = ThreadPoolExecutor(1, "edgespec-remote")
        self._connection = draft.connect(_REPLY_S)
        self._client = {
            "protocol": PROTOCOL,
            "tokenizer": draft.tokenizer,
            "vocab_size": vocab_size,
            "session": secrets.token_hex(16),
        }
        self._text: list[int] = []  # that the server has
        self._pause_s = _FIRST_PAUSE_S
        self._again_s = 0.0  # when a server that is lost is asked again

    def ask(self, text: Sequence[int], wanted: Mapping[str, Any]) -> Future[dict[str, Any] | None] | None:
        """The answer that is to come: a draft after `text`, or None where the server is lost, or refuses.

        None at once for some time after a failure. `wanted` are the fields of the request from `depth` on.
        """
        if self.is_lost and perf_counter() < self._again_s:
            return None
        return self._thread.submit(self._ask, list(text), wanted)

    def close(self) -> None:
        """Also ends a request under way."""
        self._is_closed = True
        if (connected := self._connection.sock) is not None:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        self._thread.submit(self._connection.close)
        self._thread.shutdown(wait=False)

    def _ask(self, text: list[int], wanted: Mapping[str, Any]) -> dict[str, Any] | None:
        keep = len(self._text) if text[: len(self._text)] == self._text else 0
        try:
            try:
                answer = self._post(text, keep, wanted)
            except (OSError, HTTPException, ValueError):
                if not keep or self._is_closed:
                    raise
                # The connection was idle for too long, or another client has got the cache.
                self._connection.close()
                answer = self._post(text, 0, wanted)
        except (OSError, HTTPException, ValueError) as error:
            self._connection.close()
            if self._is_closed:
                return None
            self._draft.warn_once(error)
            self._text, self.is_lost = [], True
            self._again_s, self._pause_s = perf_counter() + self._pause_s, min(2 * self._pause_s, _LAST_PAUSE_S)
            return None
        self._text, self.is_lost, self._pause_s = text, False, _FIRST_PAUSE_S
        return answer

    def _post(self, text: list[int], keep: int, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Raises OSError, HTTPException; ValueError for a refusal, with its reason."""
        change = {"keep": keep, "crc": checksum(text[:keep]), "ids": text[keep:]}
        status, body = self._draft.send(self._connection, {**self._client, **change, **wanted})
        try:
            answer: dict[str, Any] = json.loads(body)
            failure = "" if status == 200 else answer.get("error", {}).get("message", f"it says {status}")
        except (AttributeError, RecursionError) as error:
            raise ValueError("its answer cannot be read") from error
        if failure:
            raise ValueError(failure)
        return answer


class RemoteDrafter(Drafter):
    """Proposes what a draft server drafts: one request is one unit of work.

    Where no answer comes in time it proposes nothing, and until that answer has come nothing more is asked in this
    generation.
    """

    name = "remote"
    block_size = MAX_DEPTH
    waits = True

    def __init__(self, link: Link, vocab_size: int) -> None:
        """Closes `link` when it is closed. `vocab_size` is the target's."""
        self._link = link
        self._vocab_size = vocab_size
        self._draw: TokenDraw | None = None
        self._asked: Future[dict[str, Any] | None] | None = None
        self._since_s = perf_counter()  # when the target's round began
        self._round_s = float("inf")  # of the last round

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        self._draw, self.is_drawn = draw, draw is not None
        self._asked, self._since_s = None, perf_counter()

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        if self._asked is not None and not self._asked.done():
            return
        depth = min(limit.depth, MAX_DEPTH)
        wanted: dict[str, Any] = {"depth": depth, "nodes": min(max(depth, limit.nodes), MAX_NODES)}
        if self._draw is not None:
            wanted |= {"sampling": asdict(self._draw.sampling), "seed": self._draw.spawn_seed()}
        else:
            wanted["reach"] = limit.reach
        is_lost = self._link.is_lost
        self._asked = self._link.ask(text, wanted)
        if self._asked is None or is_lost:  # nobody waits to learn whether it is back
            return
        if (found := self._wait(self._asked)) is not None:
            self._add(tree, found, depth)
        self._since_s = perf_counter()
        yield  # where nothing came, the unit has cost its time all the same

    def observe(self, done: Round) -> Sequence[Outcome]:
        now = perf_counter()
        self._round_s, self._since_s = now - self._since_s, now
        return ()

    def close(self) -> None:
        self._link.close()

    def _wait(self, asked: Future[dict[str, Any] | None]) -> dict[str, Any] | None:
        """The answer; None if it does not come in time. Raises Cancelled."""
        least_s, most_s = self._link.waits_s
        until = perf_counter() + min(most_s, max(least_s, _PATIENCE * self._round_s))
        while (left := until - perf_counter()) > 0:
            self._link.check()
            with suppress(TimeoutError):
                return asked.result(min(left, _POLL_S))
        return None

    def _add(self, tree: DraftTree, found: Mapping[str, Any], depth: int) -> None:
        """Raises KeyError, TypeError or ValueError for an answer that is no draft of `depth` tokens at most."""
        tokens = found["tokens"][:MAX_NODES]
        nodes = {-1: -1}
        for i, (token, parent) in enumerate(zip(tokens, found["parents"], strict=False)):
            q, confidence = None, found["confidences"][i]
            if self.is_drawn:
                ids, weights = found["q"][i]
                q = np.zeros(self._vocab_size)
                q[ids] = weights
                q /= q.sum()
                confidence = float(q[token])
            nodes[i] = tree.add(nodes[parent], token, self.name, confidence, q)
            if tree.depths[nodes[i]] > depth:
                raise ValueError("the server drafted more than it was asked for")
