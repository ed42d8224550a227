"""The ASGI application of `edgespec draft serve`; edgespec/drafters/remote/messages.py has the protocol."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from edgespec.backends import Model, leave_thread
from edgespec.core.drafter import Drafter
from edgespec.core.protocols import Budget
from edgespec.core.sampling import Sampler
from edgespec.core.tree import DraftTree
from edgespec.drafters.block import BlockDrafter
from edgespec.drafters.remote.link import Mirror
from edgespec.drafters.remote.messages import (
    MAX_DEPTH,
    MAX_GUESSES,
    MAX_NODES,
    PATH,
    PROTOCOL,
    Ask,
    BadMessage,
    Begin,
    Drafted,
    Fault,
    Message,
    encode,
    measure_path,
    split,
)
from edgespec.drafters.sequential import ModelDraftSession, PardSession, SequentialDrafter, TruncatedDraw
from edgespec.errors import Cancelled, EdgespecError, reason_of
from edgespec.registry.tokenizer_compat import hash_vocabulary
from edgespec.server.auth import Guard, Rules
from edgespec.server.http import GetRoute, HttpError, error_response, hide_internal_error, reject_path
from edgespec.server.record import AccessLog

# The draft of `edgespec draft serve`: its caches, of which each client has one, and the thread that computes.


T = TypeVar("T")


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


class Cache:
    """A drafter with a cache of its own, for targets with `vocab_size` ids."""

    def __init__(self, draft: ServedDraft, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.is_cancelled = False  # ends what it computes at the next opportunity
        session = draft.model.open_session(self._check)
        self.drafter: Drafter
        if draft.mask_token is None:
            self.drafter = SequentialDrafter("model", ModelDraftSession(session, vocab_size))
        else:
            self.drafter = BlockDrafter("pard", PardSession(session, vocab_size, draft.mask_token))

    def _check(self) -> None:
        if self.is_cancelled:
            raise Cancelled


class DraftModel:
    """Computes on one thread: what clients wait for goes before what is guessed."""

    def __init__(self, load: Callable[[], ServedDraft], parallel: int) -> None:
        """Loads the draft. `parallel` is the number of caches at most. Raises what `load` raises."""
        self._thread = ThreadPoolExecutor(1, "edgespec-draft")
        self._parallel = parallel
        self._in_use = 0
        self._free: list[Cache] = []  # the most recently used one is last
        self._n_waiting = 0  # clients
        self._calm = asyncio.Event()
        self._calm.set()
        self._draft = self._thread.submit(load).result()
        self.tokenizer = self._thread.submit(hash_vocabulary, self._draft.model.tokenizer).result()

    @property
    def is_full(self) -> bool:
        """Whether all caches are in use."""
        return self._in_use >= self._parallel

    @property
    def name(self) -> str:
        return self._draft.name

    def describe(self) -> dict[str, Any]:
        """What GET says of the draft; `drafters.remote.messages` lists the fields."""
        return {
            "protocol": PROTOCOL,
            "model": self.name,
            "drafter": "model" if self._draft.mask_token is None else "pard",
            "tokenizer": self.tokenizer,
            "context_size": self._draft.model.context_size,
            "parallel": self._parallel,
            "in_use": self._in_use,
        }

    async def take(self, vocab_size: int) -> Cache:
        """A cache, which may hold an earlier text. There must be one that is not in use. Raises BackendError."""
        self._in_use += 1
        try:
            found = next((each for each in reversed(self._free) if each.vocab_size == vocab_size), None)
            if found is not None:
                self._free.remove(found)
                found.is_cancelled = False
                return found
            if len(self._free) + self._in_use > self._parallel:
                await self.run(self._free.pop(0).drafter.close)
            return await self.run(lambda: Cache(self._draft, vocab_size))
        except BaseException:
            self._in_use -= 1
            raise

    async def give_back(self, cache: Cache, *, is_sound: bool) -> None:
        """A cache that `is_sound` is kept for the next client."""
        cache.is_cancelled = True
        try:
            await self.run(cache.drafter.close if not is_sound else lambda: None)  # after what it still computes
            if is_sound:
                self._free.append(cache)
        finally:
            self._in_use -= 1

    async def run(self, function: Callable[[], T]) -> T:
        """The result of `function`, called on the thread. Raises what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """A client waits for what is run here."""
        self._n_waiting += 1
        self._calm.clear()
        try:
            yield
        finally:
            self._n_waiting -= 1
            if not self._n_waiting:
                self._calm.set()

    async def wait_for_calm(self) -> None:
        """Until no client waits."""
        await self._calm.wait()

    def close(self) -> None:
        """Free everything, after the last session."""
        for cache in self._free:
            self._thread.submit(cache.drafter.close)
        self._thread.submit(self._draft.close)
        self._thread.submit(leave_thread)
        self._thread.shutdown()


# What a target will probably emit in the round that verifies a draft.


_MIN_PROBABILITY = 0.03  # of what is guessed: a guess under way delays the next message by one forward
_SIBLINGS = 3  # of a drawn token, that are guessed at most
_FIRST_RATE, _FIRST_WEIGHT = 0.6, 4.0  # of accepted tokens, before any is known
_DISCOUNT = 0.97  # of earlier tokens, at every new one


def list_path(draft: Drafted) -> list[int]:
    """The nodes of the most probable child of the root, of its most probable child, and so on."""
    path, last = [], -1
    while children := [node for node, parent in enumerate(draft.parents) if parent == last]:
        last = max(children, key=lambda node: (draft.confidences[node], -node))
        path.append(last)
    return path


def list_candidates(tree: DraftTree) -> list[tuple[int, float]]:
    """(token, probability) of what may follow the root of a draft of one token, the most probable first."""
    if len(tree) and (q := tree.q[0]) is not None:
        found = [(int(token), float(q[token])) for token in np.argsort(-q)[:_SIBLINGS]]
    else:
        found = [(token, max(votes.values())) for token, votes in zip(tree.tokens, tree.votes, strict=True)]
    return found


def rank_guesses(
    draft: Drafted, path: Sequence[int], after: Sequence[tuple[int, float]], rate: float
) -> list[tuple[int, ...]]:
    """What the target may emit in the round that verifies `draft`, the most probable first.

    `after` are candidates after the whole `path`. The target accepts the path up to a token, in whose place it emits
    another candidate of the draft; or all of it, and emits one of `after`. It accepts each token at `rate`: a draft's
    own probability of its best token is another one. Those of the others say how the rest is shared.
    """
    found: list[tuple[float, tuple[int, ...]]] = []
    reached, tokens, parent = 1.0, [draft.tokens[node] for node in path], -1

    def add(others: Iterable[tuple[int, float]], depth: int, best: float) -> None:
        for token, probability in others:
            share = min(1.0, probability / max(1.0 - best, 1e-9))
            found.append((reached * (1.0 - rate) * share, (*tokens[:depth], token)))

    for depth, node in enumerate(path):
        add(_list_others(draft, node, parent), depth, draft.confidences[node])
        reached, parent = reached * rate, node
    if after:
        found.append((reached * rate, (*tokens, after[0][0])))
        add(after[1:], len(path), after[0][1])
    likely = sorted((each for each in found if each[0] >= _MIN_PROBABILITY), key=lambda each: -each[0])
    return [emitted for _, emitted in likely]


class AcceptanceRate:
    """The share of tokens on the paths of drafts that the target has accepted, those after a rejection not counted."""

    def __init__(self) -> None:
        self._accepted, self._tested = _FIRST_RATE * _FIRST_WEIGHT, _FIRST_WEIGHT

    @property
    def value(self) -> float:
        return self._accepted / self._tested

    def observe(self, draft: Drafted, emitted: Sequence[int]) -> None:
        """The target has emitted these in the round that verified `draft`."""
        for node, token in zip(list_path(draft), emitted, strict=False):
            is_accepted = draft.tokens[node] == token
            self._accepted = self._accepted * _DISCOUNT + is_accepted
            self._tested = self._tested * _DISCOUNT + 1.0
            if not is_accepted:
                return


def _list_others(draft: Drafted, node: int, parent: int) -> Iterator[tuple[int, float]]:
    """(token, probability) of what may be emitted in the place of `node`."""
    if draft.q is not None:
        ids, q = draft.q[node]
        for at in np.argsort(-q)[:_SIBLINGS]:
            if ids[at] != draft.tokens[node]:
                yield int(ids[at]), float(q[at])
        return
    for other, above in enumerate(draft.parents):
        if above == parent and other != node:
            yield draft.tokens[other], draft.confidences[other]


def describe_tree(number: int, emitted: Sequence[int], tree: DraftTree, source: str, *, is_guess: bool) -> Drafted:
    """What `source` has drafted after the text and `emitted`."""
    q = None
    if len(tree) and tree.q[0] is not None:
        q = [(np.flatnonzero(each).astype(np.int32), each[each != 0]) for each in tree.q if each is not None]
    confidences = [votes[source] for votes in tree.votes]
    return Drafted(number, tuple(emitted), list(tree.tokens), list(tree.parents), confidences, q, is_guess)


# A session of `edgespec draft serve`: one client's text, what it asks for, and what is guessed meanwhile.


_FIRST_LIMIT = Budget(4, 4)  # of a guess before the first Ask
_PROBE = Budget(1, 1)  # of a look at what may follow
_LIMITS = 8  # latest Asks; what is guessed is as deep as the deepest of them
_CANDIDATES = 64  # ids of a distribution, so that a reply of 16 tokens fits the first flight of a TCP connection
_MAX_TEXT = 2**21  # tokens
_MAX_WAITING = 64  # messages


@dataclass(slots=True)
class _Guess:
    """A draft under way within `limit`, after the text and `emitted`."""

    emitted: tuple[int, ...]
    limit: Budget
    tree: DraftTree
    units: Iterator[None]


class DraftSession:
    """Answers the messages of one client."""

    def __init__(self, model: DraftModel, cache: Cache, guesses: int, send: Callable[[bytes], Awaitable[None]]) -> None:
        """`guesses` is the number of guesses after a message, at most."""
        self._guesses = guesses
        self._model = model
        self._cache = cache
        self._send_bytes = send
        self._inbox: asyncio.Queue[Message | BadMessage | None] = asyncio.Queue()
        self._mirror = Mirror()
        self._number = 0  # of the last message
        self._limits: deque[Budget] = deque([_FIRST_LIMIT], maxlen=_LIMITS)
        self._known: list[Drafted] = []  # drafts after the present text or what is guessed to follow it
        self._guess: _Guess | None = None  # the last one, unfinished
        self._rate = AcceptanceRate()
        self._draw: TruncatedDraw | None = None

    async def serve(self, chunks: AsyncIterator[bytes]) -> bool:
        """Until the client leaves. Returns whether the cache can be used again; a fault is told to the client."""
        receiving = asyncio.create_task(self._receive(chunks))
        try:
            while (message := await self._inbox.get()) is not None:
                if isinstance(message, BadMessage):
                    raise message
                is_asked = await self._answer(message)
                if is_asked and self._guesses and self._inbox.empty():
                    await self._guess_on()
        except BadMessage as error:
            await self._send(Fault(f"{error}."))
        except Cancelled:
            return True
        except Exception as error:  # noqa: BLE001 - of a runtime; other sessions go on
            await self._send(Fault(f"the draft failed: {reason_of(error)}."))
            return False
        finally:
            receiving.cancel()
        return True

    async def _receive(self, chunks: AsyncIterator[bytes]) -> None:
        received = bytearray()
        try:
            async for chunk in chunks:
                received += chunk
                for message in split(received):
                    self._inbox.put_nowait(message)
                if self._inbox.qsize() > _MAX_WAITING:
                    raise BadMessage(f"more than {_MAX_WAITING} messages wait for an answer")
        except BadMessage as error:
            self._inbox.put_nowait(error)
        else:
            self._cache.is_cancelled = True
            self._inbox.put_nowait(None)

    async def _send(self, message: Message) -> None:
        await self._send_bytes(encode(message))

    async def _answer(self, message: Message) -> bool:
        """Returns whether a draft is wanted, now or soon. Raises BadMessage, and what a drafter raises."""
        if isinstance(message, Begin):
            self._change_text(message)
            self._draw = self._make_draw(message)
            self._known, self._guess = [], None
        elif isinstance(message, Ask) and self._mirror.tokens and not message.depth:
            self._change_text(message)
            self._known, self._guess = [], None
            probe = self._begin((), (), _PROBE)
            if await self._run_units(probe):
                await self._send(describe_tree(self._number, (), probe.tree, self._cache.drafter.name, is_guess=True))
            return False
        elif isinstance(message, Ask) and self._mirror.tokens:
            emitted = message.change.ids if message.change.keep == len(self._mirror.tokens) else None
            self._change_text(message)
            depth = min(message.depth, MAX_DEPTH)
            nodes = min(max(message.nodes, depth), MAX_NODES)
            self._limits.append(Budget(depth, nodes, reach=message.reach))
            if emitted is not None and self._known and not self._known[0].is_guess:
                self._rate.observe(self._known[0], emitted)
            with self._model.waited_for():
                found = await self._find_or_draft(emitted, is_held=message.is_held)
            self._known, self._guess = [found], None
            if not message.is_held:
                await self._send(found)
        else:
            raise BadMessage("a session starts with a Begin, and other messages are Asks")
        return True

    def _change_text(self, message: Begin | Ask) -> None:
        ids = message.change.ids
        if len(ids) and not 0 <= min(ids) <= max(ids) < self._cache.vocab_size:
            raise BadMessage(f"the ids of tokens are 0 to {self._cache.vocab_size - 1}")
        if message.change.keep + len(ids) > _MAX_TEXT:
            raise BadMessage(f"a text has {_MAX_TEXT:,} tokens at most")
        self._mirror.apply(message.change)
        if not self._mirror.tokens:
            raise BadMessage("the text is empty")
        self._number = message.number

    def _make_draw(self, message: Begin) -> TruncatedDraw | None:
        if message.sampling is None:
            return None
        try:
            sampler = Sampler(message.sampling, self._cache.vocab_size)
        except EdgespecError as error:
            raise BadMessage(error.message.rstrip(".")) from error
        return TruncatedDraw(sampler, message.seed, _CANDIDATES)

    async def _find_or_draft(self, emitted: Sequence[int] | None, *, is_held: bool) -> Drafted:
        """A draft after the text, which has grown by `emitted`: one that is known, else a new one.

        The client holds the longest one, if it `is_held`. Raises what a drafter raises.
        """
        known = [] if emitted is None else [cut for each in self._known if (cut := each.after(emitted)) is not None]
        found = max(known, key=lambda each: len(each.tokens), default=None)
        limit = self._limits[-1]
        if is_held or (found is not None and found.is_enough(limit.depth, limit.reach)):
            found = found or Drafted(0, (), (), (), ())
            return Drafted(self._number, (), found.tokens, found.parents, found.confidences, found.q)
        guess = self._guess
        is_begun = guess is not None and emitted is not None and (tuple(emitted), limit) == (guess.emitted, guess.limit)
        if not is_begun or guess is None:
            guess = self._begin((), (), limit)
        await self._model.run(lambda: sum(1 for _ in guess.units))
        return describe_tree(self._number, (), guess.tree, self._cache.drafter.name, is_guess=False)

    async def _guess_on(self) -> None:
        """Draft after what the target will probably emit, until the next message."""
        draft = self._known[0] if self._known else Drafted(self._number, (), (), (), ())
        path, limit = list_path(draft), self._choose_limit()
        probe = self._begin((), [draft.tokens[node] for node in path], _PROBE)
        if await self._run_units(probe):
            after = list_candidates(probe.tree)
            for emitted in islice(rank_guesses(draft, path, after, self._rate.value), self._guesses):
                guess = self._guess = self._begin(emitted, emitted, limit)
                if not await self._run_units(guess):
                    return
                self._guess = None
                found = describe_tree(self._number, emitted, guess.tree, self._cache.drafter.name, is_guess=True)
                if found.tokens:
                    self._known.append(found)
                    await self._send(found)

    def _begin(self, emitted: Sequence[int], tokens: Sequence[int], limit: Budget) -> _Guess:
        """A draft that is to begin after the present text and `tokens`, for a target that has `emitted`."""
        tree, text = DraftTree(), [*self._mirror.tokens, *tokens]
        return _Guess(tuple(emitted), limit, tree, _expand(self._cache.drafter, tree, text, limit, self._draw))

    def _choose_limit(self) -> Budget:
        """The limit of guesses: enough for the next Ask, if that is like the latest ones."""
        depth, nodes = (max(getattr(each, name) for each in self._limits) for name in ("depth", "nodes"))
        is_tree = nodes > depth  # whose other branches may be accepted, and then a token of what is guessed after them
        return Budget(min(depth + is_tree, MAX_DEPTH), nodes, reach=self._limits[-1].reach)

    async def _run_units(self, guess: _Guess) -> bool:
        """Run its units; False where a message has come meanwhile."""
        while True:
            await self._model.wait_for_calm()
            if not self._inbox.empty():
                return False
            if await self._model.run(lambda: next(guess.units, self)) is self:
                return True


def _expand(
    drafter: Drafter, tree: DraftTree, text: Sequence[int], limit: Budget, draw: TruncatedDraw | None
) -> Iterator[None]:
    if draw is not None:
        draw.start = len(text)
    drafter.begin(text, draw)  # it may have read what was guessed wrongly
    for _ in drafter.expand(tree, text, limit):
        yield
        # How many tokens are drawn must not depend on them, nor whether they come in time.
        confidences = [votes[drafter.name] for votes in tree.votes]
        if draw is None and measure_path(tree.parents, confidences)[1] < limit.reach:
            return


_MAX_VOCABULARY = 2**22


def draft_application(model: DraftModel, rules: Rules) -> Starlette:
    """The ASGI application; it closes `model` when it shuts down."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            model.close()

    return Starlette(
        routes=[GetRoute(PATH, model.describe), Route(PATH, Sessions(model), methods=["POST"])],
        middleware=[Middleware(AccessLog), Middleware(Guard, rules=rules)],
        lifespan=lifespan,
        exception_handlers=dict.fromkeys((404, 405), partial(reject_path, hint=f"A draft server has {PATH} alone.")),
    )


class Sessions:
    """POST: a session, whose messages go in both bodies at the same time."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            vocab_size, guesses = self._check(Request(scope))
            cache = await self._model.take(vocab_size)
        except Exception as error:  # noqa: BLE001 - a bug is logged and must not stop the server
            await error_response(scope["path"], hide_internal_error(error))(scope, receive, send)
            return

        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        is_sound = False
        try:
            headers = [(b"content-type", b"application/octet-stream"), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await write(b"")
            is_sound = await DraftSession(self._model, cache, guesses, write).serve(_read(receive))
        except asyncio.CancelledError:  # the server stops
            with suppress(OSError):
                await write(encode(Fault("the server is shutting down.")))
        finally:
            await self._model.give_back(cache, is_sound=is_sound)
        await send({"type": "http.response.body", "body": b""})

    def _check(self, request: Request) -> tuple[int, int]:
        """The size of the client's vocabulary, and guesses. Raises HttpError where there can be no session."""
        model, query = self._model, request.query_params
        if query.get("protocol") != str(PROTOCOL):
            raise HttpError(
                409,
                f"the client speaks version {query.get('protocol', 'none')[:20]} of the protocol, and the draft server "
                f"version {PROTOCOL}.",
                hint="Install the same version of edgespec on both machines.",
            )
        if query.get("tokenizer") != model.tokenizer:
            message = f"the tokenizer of {model.name} is not the target's."
            raise HttpError(409, message, hint="Serve a draft of the target's family.")
        vocab_size, guesses = (_read_number(query.get(name, "")) for name in ("vocab_size", "guesses"))
        if not 0 < vocab_size <= _MAX_VOCABULARY or guesses < 0:
            message = "vocab_size and guesses have to be numbers."
            raise HttpError(400, message, hint="Send the size of the target's vocabulary.")
        if model.is_full:
            message = "all caches of the draft server are in use."
            raise HttpError(429, message, hint="Raise --parallel, or try again later.")
        return vocab_size, min(guesses, MAX_GUESSES)


def _read_number(text: str) -> int:
    """-1 for what is no number."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else -1


async def _read(receive: Receive) -> AsyncIterator[bytes]:
    """The parts of a request's body, to its end or that of the connection."""
    while (message := await receive())["type"] != "http.disconnect":
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return
