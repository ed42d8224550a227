"""The sessions of an engine: several caches, so that conversations that take turns need not be read anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgespec.backends.sequence import shared_prefix
from edgespec.core.protocols import CheckCancelled, Session
from edgespec.errors import BackendError

_LITTLE = 64  # tokens that are read again sooner than another cache is opened


@dataclass(eq=False)
class Slot:
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


class SlotPool:
    """Opened when they are first needed, `max_slots` of them; the one used least lately makes way."""

    def __init__(self, opened: Callable[[], Slot], max_slots: int, *, adopts: bool = False) -> None:
        """`adopts`: whether one takes over what another one holds at no cost."""
        self._opened = opened
        self.max_slots = max_slots
        self._adopts = adopts
        self._kept: list[Slot] = []  # the one used last is last

    def acquire(self, prompt: Sequence[int], check: CheckCancelled) -> Slot | None:
        """One that nobody else uses until `release`: the one that holds the longest beginning of `prompt`, if that is
        at least half of what it holds, or, where a new one could take that over, all but little of it; else an empty
        one, else the one used least lately, which takes over what another one holds of the beginning, if it can. None
        while all are in use. Raises BackendError.
        """
        common = {slot: shared_prefix(slot.tokens, prompt, len(prompt)) for slot in self._kept}
        free = [slot for slot in self._kept if not slot.is_taken]
        found = max(free, key=lambda slot: common[slot], default=None)
        if found is None or self._is_spoilt(found, common[found]):
            found = self._another(free)
            if found is None:
                return None
        # While a prompt is being read, less is held than what is in common.
        held = {slot: min(n, slot.target.position) for slot, n in common.items()}
        source = max(held, key=lambda slot: held[slot], default=found)
        if held.get(source, 0) > held.get(found, 0):
            found.target.adopt(source.target, held[source])
        found.is_taken, found.check, found.tokens = True, check, list(prompt)
        self._kept = [*(slot for slot in self._kept if slot is not found), found]
        return found

    def release(self, slot: Slot, tokens: list[int]) -> None:
        """It holds `tokens` now."""
        slot.is_taken, slot.tokens = False, tokens

    def drop(self, slot: Slot) -> None:
        """Close one that is in no defined state."""
        self._kept.remove(slot)
        slot.close()

    def drop_free(self) -> None:
        """Close those that nobody uses."""
        for slot in [each for each in self._kept if not each.is_taken]:
            self.drop(slot)

    def close(self) -> None:
        kept, self._kept = self._kept, []
        for slot in kept:
            slot.close()

    def _is_spoilt(self, slot: Slot, common: int) -> bool:
        """Whether too much is lost of what it holds if no more than `common` tokens are kept."""
        lost = len(slot.tokens) - common
        return lost > common or (self._adopts and lost > _LITTLE and len(self._kept) < self.max_slots)

    def _another(self, free: Sequence[Slot]) -> Slot | None:
        if len(self._kept) < self.max_slots:
            try:
                return self._opened()
            except BackendError:  # there is no memory for one more
                if not self._kept:
                    raise
                self.max_slots = len(self._kept)
        return free[0] if free else None
