"""A session of `edgespec draft serve`: one client's text, what it asks for, and what is guessed meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter
from edgespec.core.protocols import Budget
from edgespec.core.sampling import Sampler
from edgespec.drafters.remote.messages import (
    MAX_DEPTH,
    MAX_NODES,
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
from edgespec.drafters.remote.mirror import Mirror
from edgespec.drafters.sampling import TruncatedDraw
from edgespec.errors import Cancelled, EdgespecError, reason_of
from edgespec.server.draft_guesses import (
    AcceptanceRate,
    describe_tree,
    list_candidates,
    list_path,
    rank_guesses,
)
from edgespec.server.draft_model import Cache, DraftModel

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

    def is_for(self, emitted: Sequence[int] | None, limit: Budget) -> bool:
        """Whether it is what is wanted after the text has grown by `emitted`."""
        return emitted is not None and tuple(emitted) == self.emitted and limit == self.limit


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
            probe = self._make_probe(())
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
        """Raises BadMessage."""
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
        """Raises BadMessage."""
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
        guess, tree = self._guess, DraftTree()
        if guess is not None and guess.is_for(emitted, limit):
            await self._model.run(lambda: sum(1 for _ in guess.units))
            tree = guess.tree
        else:
            units = self._expand(tree, (), limit)
            await self._model.run(lambda: sum(1 for _ in units))
        return describe_tree(self._number, (), tree, self._cache.drafter.name, is_guess=False)

    async def _guess_on(self) -> None:
        """Draft after what the target will probably emit, until the next message."""
        draft = self._known[0] if self._known else Drafted(self._number, (), (), (), ())
        path, limit = list_path(draft), self._choose_limit()
        probe = self._make_probe([draft.tokens[node] for node in path])
        if await self._run_units(probe):
            after = list_candidates(probe.tree)
            for emitted in islice(rank_guesses(draft, path, after, self._rate.value), self._guesses):
                tree = DraftTree()
                self._guess = _Guess(emitted, limit, tree, self._expand(tree, emitted, limit))
                if not await self._run_units(self._guess):
                    return
                self._guess = None
                found = describe_tree(self._number, emitted, tree, self._cache.drafter.name, is_guess=True)
                if found.tokens:
                    self._known.append(found)
                    await self._send(found)

    def _make_probe(self, tokens: Sequence[int]) -> _Guess:
        """A look at what may follow the present text and `tokens`, which are read for it."""
        tree = DraftTree()
        return _Guess((), _PROBE, tree, self._expand(tree, tokens, _PROBE))

    def _choose_limit(self) -> Budget:
        """Of what is guessed: enough for the next Ask, if that is like the latest ones."""
        depth, nodes = (max(getattr(each, name) for each in self._limits) for name in ("depth", "nodes"))
        is_tree = nodes > depth  # whose other branches may be accepted, and then a token of what is guessed after them
        return Budget(min(depth + is_tree, MAX_DEPTH), nodes, reach=self._limits[-1].reach)

    def _expand(self, tree: DraftTree, emitted: Sequence[int], limit: Budget) -> Iterator[None]:
        """Draft into `tree` after the present text and `emitted`."""
        return _expand(self._cache.drafter, tree, [*self._mirror.tokens, *emitted], limit, self._draw)

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
