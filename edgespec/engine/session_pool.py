"""The slots of an engine: sessions that keep their KV caches from request to request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from edgespec.backends.sequence import shared_prefix
from edgespec.core.drafter import Drafter
from edgespec.core.protocols import CheckCancelled, Session
from edgespec.drafters import SlotMemory
from edgespec.errors import BackendError

_CHEAP_PREFILL = 64  # tokens that are read again rather than opening another slot


@dataclass(eq=False)
class Slot:
    """A session of the target, its drafters by name, the tokens of their last text, and the check that all poll.

    prompt  how many of those tokens were the prompt
    saved   what drafters have left when they were closed, by name; the slots of an engine share it
    memory  the earlier texts that its drafters may use
    """

    target: Session
    drafters: dict[str, Drafter] = field(default_factory=dict)
    saved: dict[str, bytes] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    prompt: int = 0
    check: CheckCancelled = lambda: None
    is_taken: bool = False
    memory: SlotMemory = field(default_factory=SlotMemory)

    def close_drafter(self, name: str, *, has_failed: bool = False) -> None:
        """Close a drafter and keep what it saves, unless it has failed; what it raises does not matter any more."""
        drafter = self.drafters.pop(name, None)
        if drafter is None:  # the whole slot was closed
            return
        with suppress(Exception):
            if not has_failed and (saved := drafter.save()) is not None:
                self.saved[name] = saved
        with suppress(Exception):
            drafter.close()

    def close(self) -> None:
        for name in tuple(self.drafters):  # they may read the target's cache
            self.close_drafter(name)
        self.target.close()


class SlotPool:
    """Up to `max_slots` slots, opened when they are first needed; the least recently used one is given up first."""

    def __init__(self, open_slot: Callable[[], Slot], max_slots: int, *, adopts: bool = False) -> None:
        """`adopts`: whether slots seem able to take over each other's prefixes without computing them."""
        self._open_slot = open_slot
        self.max_slots = max_slots
        self._adopts = adopts
        self._kept: list[Slot] = []  # the most recently used one is last

    def acquire(self, prompt: Sequence[int], check: CheckCancelled) -> Slot | None:
        """A slot for `prompt`, until `release`; None while all are in use. Raises BackendError.

        The slot that has just answered the same prompt is chosen, so that the answer is computed in the same cells and
        is the same. Else it is the one with the longest common prefix, unless too much of its cache would be lost.
        Then a new slot is opened, or the least recently used one is taken; it adopts the longest prefix of any slot
        where it can.
        """
        common = {slot: shared_prefix(slot.tokens, prompt, len(prompt)) for slot in self._kept}
        same = {slot for slot, n in common.items() if n == len(prompt) == slot.prompt}
        free = [slot for slot in self._kept if not slot.is_taken]
        best = max(free, key=lambda slot: (slot in same, common[slot]), default=None)
        found = best
        if best is None or (best not in same and self._loses_much(best, common[best])):
            found = self._open_another(free)
        if found is None:
            return None
        # During a prefill the cache holds less than the tokens of its prompt.
        held = {slot: min(n, slot.target.position) for slot, n in common.items()}
        source = max(held, key=lambda slot: held[slot], default=found)
        if held.get(source, 0) > held.get(found, 0) and not found.target.adopt(source.target, held[source]):
            self._adopts = self._adopts and held[source] <= _CHEAP_PREFILL  # a copy of few tokens may not pay
            if best is not None and not self._loses_much(best, common[best]):
                found = best  # the slot that was opened beside it stays for others
        found.is_taken, found.check, found.tokens, found.prompt = True, check, list(prompt), len(prompt)
        self._kept = [*(slot for slot in self._kept if slot is not found), found]
        return found

    def release(self, slot: Slot, tokens: list[int]) -> None:
        """End the use of a slot, which holds `tokens` now."""
        slot.is_taken, slot.tokens = False, tokens

    def drop(self, slot: Slot) -> None:
        """Close a slot whose state is undefined."""
        self._kept.remove(slot)
        slot.close()

    def discard(self, slot: Slot, error: Exception) -> None:
        """Close a slot that failed between forward and commit; a runtime's error may have damaged what slots share."""
        self.drop(slot)
        if isinstance(error, BackendError):
            for free in [each for each in self._kept if not each.is_taken]:
                self.drop(free)

    def close(self) -> None:
        kept, self._kept = self._kept, []
        for slot in kept:
            slot.close()

    def _loses_much(self, slot: Slot, common: int) -> bool:
        """Whether cutting the cache to `common` tokens loses more than another slot would cost."""
        lost = len(slot.tokens) - common
        return lost > common or (self._adopts and lost > _CHEAP_PREFILL and len(self._kept) < self.max_slots)

    def _open_another(self, free: Sequence[Slot]) -> Slot | None:
        if len(self._kept) < self.max_slots:
            try:
                return self._open_slot()
            except BackendError:  # no memory for one more
                if not self._kept:
                    raise
                self.max_slots = len(self._kept)
        return free[0] if free else None
