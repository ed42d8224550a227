"""The sessions of an engine: several caches, so that conversations that take turns need not be read anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgespec.backends.sequence import shared_prefix
from edgespec.core.protocols import CheckCancelled, Session
from edgespec.errors import BackendError

_LITTLE = 64  # tokens that are read again sooner than another cache is opened


@dataclass(eq=False)
class Cache:
    """A session of the target and one of its draft, the text that they held last, and what they poll."""

    target: Session
    draft: Session | None
    tokens: list[int] = field(default_factory=list)
    check: CheckCancelled = lambda: None
    is_taken: bool = False

    def close(self) -> None:
        if self.draft is not None:  # it may follow the target's
            self.draft.close()
        self.target.close()


class Caches:
    """Opened when they are first needed, `at_most` of them; the one used least lately makes way."""

    def __init__(self, opened: Callable[[], Cache], at_most: int, *, adopts: bool = False) -> None:
        """`adopts`: whether one takes over what another one holds at no cost."""
        self._opened = opened
        self.at_most = at_most
        self._adopts = adopts
        self._kept: list[Cache] = []  # the one used last is last

    def take(self, prompt: Sequence[int], check: CheckCancelled) -> Cache | None:
        """One that nobody else uses until `give_back`: the one that holds the longest beginning of `prompt`, if that is
        at least half of what it holds, or, where a new one could take that over, all but little of it; else an empty
        one, else the one used least lately, which takes over what another one holds of the beginning, if it can. None
        while all are in use. Raises BackendError.
        """
        common = {cache: shared_prefix(cache.tokens, prompt, len(prompt)) for cache in self._kept}
        free = [cache for cache in self._kept if not cache.is_taken]
        found = max(free, key=lambda cache: common[cache], default=None)
        if found is None or self._is_spoilt(found, common[found]):
            found = self._another(free)
            if found is None:
                return None
        # While a prompt is being read, less is held than what is in common.
        held = {cache: min(n, cache.target.position) for cache, n in common.items()}
        source = max(held, key=lambda cache: held[cache], default=found)
        if held.get(source, 0) > held.get(found, 0):
            found.target.adopt(source.target, held[source])
        found.is_taken, found.check, found.tokens = True, check, list(prompt)
        self._kept = [*(cache for cache in self._kept if cache is not found), found]
        return found

    def give_back(self, cache: Cache, tokens: list[int]) -> None:
        """It holds `tokens` now."""
        cache.is_taken, cache.tokens = False, tokens

    def drop(self, cache: Cache) -> None:
        """Close one that is in no defined state."""
        self._kept.remove(cache)
        cache.close()

    def drop_free(self) -> None:
        """Close those that nobody uses."""
        for cache in [each for each in self._kept if not each.is_taken]:
            self.drop(cache)

    def close(self) -> None:
        kept, self._kept = self._kept, []
        for cache in kept:
            cache.close()

    def _is_spoilt(self, cache: Cache, common: int) -> bool:
        """Whether too much is lost of what it holds if no more than `common` tokens are kept."""
        lost = len(cache.tokens) - common
        return lost > common or (self._adopts and lost > _LITTLE and len(self._kept) < self.at_most)

    def _another(self, free: Sequence[Cache]) -> Cache | None:
        if len(self._kept) < self.at_most:
            try:
                return self._opened()
            except BackendError:  # there is no memory for one more
                if not self._kept:
                    raise
                self.at_most = len(self._kept)
        return free[0] if free else None
