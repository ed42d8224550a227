"""The ASGI application of `edgespec draft serve`; edgespec/drafters/remote.py has the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from edgespec.backends import Model, leave_thread
from edgespec.core.drafter import Drafter, TokenDraw
from edgespec.core.protocols import Budget
from edgespec.core.sampling import Logits, Probs, Rng, Sampler, SamplingParams, index_at
from edgespec.core.tree import DraftTree
from edgespec.drafters.block import BlockDrafter
from edgespec.drafters.remote import MAX_DEPTH, MAX_NODES, PATH, PROTOCOL, checksum
from edgespec.drafters.sequential import ModelDraftSession, PardSession, RequestDraw, SequentialDrafter
from edgespec.errors import Cancelled, InvalidRequest
from edgespec.registry.tokenizer_compat import hash_vocabulary
from edgespec.server.auth import Guard, Rules
from edgespec.server.fields import Body
from edgespec.server.http import BodyRoute, GetRoute, HttpError, JsonResponse, reject_path
from edgespec.server.record import AccessLog

_MAX_TEXT = 2**21  # tokens
_CANDIDATES = 64  # ids of a distribution, so that an answer of 16 tokens fits the first flight of a TCP connection


class DraftRequest(Body):
    """The body of POST."""

    protocol: Annotated[int, Field(ge=PROTOCOL, le=PROTOCOL)]
    tokenizer: str
    vocab_size: Annotated[int, Field(ge=1, le=2**22)]
    session: Annotated[str, Field(max_length=64)]
    keep: Annotated[int, Field(ge=0)]
    crc: int
    ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
    depth: Annotated[int, Field(ge=1, le=MAX_DEPTH)]
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)]
    reach: float = 0.0
    sampling: SamplingParams | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


class TruncatedDraw(RequestDraw):
    """Draws from the most probable tokens of a sampler chain alone, so that the distributions are short.

    They are float32 and hold the very weights that decide the draw.
    """

    def __init__(self, sampler: Sampler, rng: Rng, most: int) -> None:
        """`most` is the number of tokens that a distribution has at most."""
        super().__init__(sampler, rng)
        self._most = most

    def draw(self, logits: Logits, prefix: Sequence[int]) -> tuple[int, Probs]:
        found = self._sampler.distribution(logits, prefix)
        weights = found.weights
        ids = np.arange(len(weights), dtype=np.int32) if found.ids is None else found.ids
        if len(weights) > self._most:
            kept = np.argpartition(weights, -self._most)[-self._most :]
            weights, ids = weights[kept], ids[kept]
        weights = (weights / weights.sum()).astype(np.float32)
        token = int(ids[index_at(weights, self._rng.random())])
        q = np.zeros(len(logits), np.float32)
        q[ids] = weights
        return token, q


@dataclass(frozen=True, slots=True)
class ServedDraft:
    """A loaded draft.

    mask_token  of a PARD model, None for any other
    close       frees it
    """

    name: str
    model: Model
    close: Callable[[], None]
    mask_token: int | None = None


@dataclass(slots=True)
class _Client:
    """A drafter with a cache of its own, for a target with `vocab_size` ids, and the text of the last request."""

    drafter: Drafter
    vocab_size: int
    text: list[int] = field(default_factory=list)


class DraftModel:
    """Computes drafts, one after the other, on a thread that owns the draft and the caches."""

    def __init__(self, load: Callable[[], ServedDraft], parallel: int) -> None:
        """Loads the draft. `parallel` is the number of caches at most. Raises what `load` raises."""
        self._thread = ThreadPoolExecutor(1, "edgespec-draft")
        self._parallel = parallel
        self._clients: dict[str, _Client] = {}  # by session, the most recently used one is last
        self._is_closing = False
        self._draft = self._thread.submit(load).result()
        self.name = self._draft.name
        self.tokenizer = self._thread.submit(hash_vocabulary, self._draft.model.tokenizer).result()

    def describe(self) -> dict[str, Any]:
        """What GET says of the draft; `drafters.remote` lists the fields."""
        return {
            "protocol": PROTOCOL,
            "model": self.name,
            "drafter": "model" if self._draft.mask_token is None else "pard",
            "tokenizer": self.tokenizer,
            "context_size": self._draft.model.context_size,
            "parallel": self._parallel,
            "in_use": len(self._clients),
        }

    async def respond(self, _request: Request, body: DraftRequest) -> Response:
        """The draft that is asked for. Raises EdgespecError."""
        if body.tokenizer != self.tokenizer:
            message = f"the tokenizer of {self.name} is not the target's."
            raise HttpError(409, message, hint="Serve a draft of the target's family.")
        return JsonResponse(await asyncio.get_running_loop().run_in_executor(self._thread, self._draft_for, body))

    def close(self) -> None:
        """Free everything, after the last request."""
        self._is_closing = True
        self._thread.submit(self._free)
        self._thread.shutdown()

    def _free(self) -> None:
        for client in self._clients.values():
            client.drafter.close()
        self._draft.close()
        leave_thread()

    def _check(self) -> None:
        if self._is_closing:
            raise Cancelled

    def _draft_for(self, body: DraftRequest) -> dict[str, Any]:
        client = self._clients.get(body.session)
        kept = client.text[: body.keep] if client is not None else []
        if len(kept) < body.keep or checksum(kept) != body.crc:
            raise HttpError(412, "the text that is kept is not known here.", hint="Send the whole text.")
        if len(kept) + len(body.ids) > _MAX_TEXT:
            raise InvalidRequest(f"the text has more than {_MAX_TEXT:,} tokens.", hint="Send a shorter one.")
        text = [*kept, *body.ids]
        if not text or max(text) >= body.vocab_size:
            message = f"the text needs ids of 0 to {body.vocab_size - 1}, one at least."
            raise InvalidRequest(message, hint="Send those of the target.")
        draw = None
        if body.sampling is not None:
            rng = np.random.Generator(np.random.PCG64(body.seed))
            draw = TruncatedDraw(Sampler(body.sampling, body.vocab_size), rng, _CANDIDATES)
        client = self._take_client(body)
        try:
            answer = _expand(client.drafter, text, body, draw)
        except BaseException:
            client.drafter.close()
            raise
        client.text = text
        self._clients[body.session] = client
        return answer

    def _take_client(self, body: DraftRequest) -> _Client:
        """Remove the client with this session, else the least recently used one if there is no room for another."""
        client = self._clients.pop(body.session, None)
        if client is None and len(self._clients) >= self._parallel:
            client = self._clients.pop(next(iter(self._clients)))
        if client is not None and client.vocab_size == body.vocab_size:
            return client
        if client is not None:
            client.drafter.close()
        session, mask_token = self._draft.model.open_session(self._check), self._draft.mask_token
        if mask_token is None:
            return _Client(SequentialDrafter("model", ModelDraftSession(session, body.vocab_size)), body.vocab_size)
        return _Client(BlockDrafter("pard", PardSession(session, body.vocab_size, mask_token)), body.vocab_size)


def _expand(drafter: Drafter, text: list[int], body: DraftRequest, draw: TokenDraw | None) -> dict[str, Any]:
    """The answer with what `drafter` proposes after `text`."""
    tree, name = DraftTree(), drafter.name
    reach = body.reach if draw is None else 0.0  # how many tokens are drawn must not depend on them
    drafter.begin(text, draw)
    for _ in drafter.expand(tree, text, Budget(body.depth, body.nodes, reach=1.0)):  # one path: rows may cost much here
        if tree.path_confidence(tree.deepest(name), name) < reach:
            break
    q = [(np.flatnonzero(each).tolist(), each[each != 0].tolist()) for each in tree.q if each is not None]
    return {
        "tokens": tree.tokens,
        "parents": tree.parents,
        "confidences": [votes[name] for votes in tree.votes],
        "q": q or None,
    }


def draft_application(model: DraftModel, rules: Rules) -> Starlette:
    """The ASGI application; it closes `model` when it shuts down."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        model.close()

    return Starlette(
        routes=[GetRoute(PATH, model.describe), BodyRoute(PATH, DraftRequest, model.respond)],
        middleware=[Middleware(AccessLog), Middleware(Guard, rules=rules)],
        lifespan=lifespan,
        exception_handlers=dict.fromkeys((404, 405), partial(reject_path, hint=f"A draft server has {PATH} alone.")),
    )
