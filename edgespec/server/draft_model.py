"""The draft of `edgespec draft serve`: its caches, of which each client has one, and the thread that computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from edgespec.backends import Model, leave_thread
from edgespec.core.drafter import Drafter
from edgespec.drafters.block import BlockDrafter
from edgespec.drafters.pard import PardSession
from edgespec.drafters.remote.messages import PROTOCOL
from edgespec.drafters.sequential import ModelDraftSession, SequentialDrafter
from edgespec.errors import Cancelled
from edgespec.registry.tokenizer_compat import hash_vocabulary

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
        """Raises BackendError."""
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
        """See `drafters.remote.messages`."""
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
