"""The sessions of an engine: several caches, so that conversations that take turns need not be read anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgespec.backends.sequence import shared_prefix
from edgespec.core.protocols import Session
from edgespec.errors import BackendError


@dataclass
class Cache:
    """A session of the target and one of its draft; `tokens` is the text that they held last."""

    target: Session
    draft: Session | None
    tokens: list[int] = field(default_factory=list)

    def close(self) -> None:
        if self.draft is not None:  # it may follow the target's
            self.draft.close()
        self.target.close()


class Caches:
    """Opened when they are first needed, `at_most` of them; the one used least lately makes way."""

    def __init__(self, opened: Callable[[], Cache], at_most: int) -> None:
        self._opened = opened
        self._at_most = at_most
        self._kept: list[Cache] = []  # the one used last is last

    def any(self) -> Cache:
        """The one used last."""
        if not self._kept:
            self._kept.append(self._opened())
        return self._kept[-1]

    def best_for(self, prompt: Sequence[int]) -> Cache:
        """The one that holds the longest beginning of `prompt`, if that is at least half of what it holds; else an
        empty one, else the one used least lately.
        """
        found = max(self._kept, key=lambda cache: shared_prefix(cache.tokens, prompt, len(prompt)), default=None)
        if found is None or 2 * shared_prefix(found.tokens, prompt, len(prompt)) < len(found.tokens):
            found = self._another()
        self._kept = [*(cache for cache in self._kept if cache is not found), found]
        return found

    def drop(self, cache: Cache) -> None:
        """Close one that is in no defined state."""
        self._kept.remove(cache)
        cache.close()

    def close(self) -> None:
        kept, self._kept = self._kept, []
        for cache in kept:
            cache.close()

    def _another(self) -> Cache:
        if len(self._kept) < self._at_most:
            try:
                return self._opened()
            except BackendError:  # there is no memory for one more
                if not self._kept:
                    raise
        return self._kept[0]
