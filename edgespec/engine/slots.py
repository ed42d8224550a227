"""The slots of an engine: sessions that keep their KV caches from request to request."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from edgespec.backends.sequence import cheap_prefill, shared_prefix
from edgespec.core.drafter import Drafter
from edgespec.core.protocols import Session, Storable
from edgespec.drafters.registry import SlotMemory
from edgespec.engine.events import MemoryUse, PrefixLoss, SlotState
from edgespec.engine.prefix_loss import LEAST_LOSS, EarlierText
from edgespec.errors import BackendError
from edgespec.memory.memory import Memory
from edgespec.memory.prefix_files import FILE_BYTES, LEAST_TOKENS, PrefixFiles, SavedText

_MAX_GIVEN = 8
_MOST_BORROWED = 2**34  # bytes of a cache that is kept aside


@dataclass(eq=False)
class Slot:
    """A session of the target, its drafters by name, and the tokens of their last text.

    prompt  how many of those tokens were the prompt
    earlier the texts of this and other slots when the request came
    owner   whose text it is
    held    tokens of the prompt that the cache had when the request came, or adopted then
    loss    why tokens of the prompt were read again; None if it is not known, or if none were
    number  among the slots that are open
    use     what the request uses of the memory; None: its text is kept nowhere
    memory  the earlier texts that its drafters may use
    """

    target: Session = field(init=False)
    drafters: dict[str, Drafter] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    prompt: int = 0
    earlier: Sequence[EarlierText] = ()
    owner: str = ""
    held: int = 0
    loss: PrefixLoss | None = None
    number: int = 0
    use: MemoryUse | None = None
    is_taken: bool = False
    memory: SlotMemory = field(default_factory=SlotMemory)

    def close_drafter(self, name: str) -> None:
        """Close a drafter, unless the whole slot was closed; what it raises does not matter any more."""
        drafter = self.drafters.pop(name, None)
        with suppress(Exception):
            if drafter is not None:
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
        self._may_adopt = self._adopts = adopts
        self._kept: list[Slot] = []  # the most recently used one is last
        self._given: deque[tuple[str, Sequence[int]]] = deque(maxlen=_MAX_GIVEN)  # (owner, text) that slots have lost

    def acquire(self, prompt: Sequence[int], owner: str = "", n_saved: int = 0) -> Slot | None:
        """A slot for `prompt`, until `release`; None while all are in use. Raises BackendError.

        `owner`: whose text it is. `n_saved`: how many tokens of it a file has; no fewer are taken over from a slot.

        The slot that has just answered the same prompt is chosen, so that the answer is computed in the same cells and
        is the same. Else it is the one with the longest common prefix, unless too much of its cache would be lost.
        Then a new slot is opened, or the least recently used one is taken; it adopts the longest prefix of any slot
        if it can.
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
        context_size = found.target.capabilities.context_size
        held = {slot: min(n, slot.target.position) for slot, n in common.items()}
        source = max(held, key=lambda slot: held[slot], default=found)
        found.held = held.get(found, 0)
        if held.get(source, 0) > max(found.held, n_saved):
            if found.target.adopt(source.target, held[source]):
                found.held = held[source]
                self._adopts = self._may_adopt  # a copy that failed before was an exception, as without memory
            else:
                self._adopts = self._adopts and held[source] <= cheap_prefill(context_size)  # a copy may not pay
                if best is not None and not self._loses_much(best, common[best]):
                    if found not in self._kept:  # the slot that was opened beside it stays for others
                        self._kept.insert(0, found)
                    found = best
                    found.held = held[best]
        found.earlier = self._list_texts(found, owner)
        if len(found.tokens) - common.get(found, 0) >= LEAST_LOSS:
            self._given.append((found.owner, array("i", found.tokens)))
        found.is_taken, found.tokens, found.prompt = True, list(prompt), len(prompt)
        found.owner, found.loss = owner, None
        self._kept = [*(slot for slot in self._kept if slot is not found), found]
        return found

    @contextmanager
    def borrow(self) -> Iterator[Slot]:
        """A slot for measurements. What its cache holds of a text is put back at the end.

        Raises BackendError if all slots are in use, or hold texts that cannot be kept aside.
        """
        free = self.free
        slot = next((each for each in free if not each.tokens), None) or self._open_another(free)
        if slot is None:
            raise BackendError("all slots are in use.")
        if slot not in self._kept:
            self._kept.insert(0, slot)
        target, tokens = slot.target, slot.tokens[: slot.target.position]
        state = target.save_state(_MOST_BORROWED) if tokens and isinstance(target, Storable) else None
        if tokens and state is None:
            raise BackendError("all slots hold texts that cannot be kept aside.")
        slot.is_taken = True
        try:
            yield slot
        finally:
            slot.is_taken = False
            is_back = state is not None and isinstance(target, Storable) and target.restore_state(tokens, state)
            slot.tokens = slot.tokens if is_back else []

    def release(self, slot: Slot, tokens: list[int]) -> None:
        """End the use of a slot, whose text is `tokens` now. After a cancellation the slot holds its beginning only."""
        slot.is_taken, slot.tokens, slot.earlier = False, _held(slot, tokens), ()

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

    @property
    def free(self) -> Sequence[Slot]:
        """The slots that are not in use, the least recently used one first."""
        return [slot for slot in self._kept if not slot.is_taken]

    def is_alone(self, slot: Slot) -> bool:
        """Whether no other slot is in use."""
        return not any(each.is_taken for each in self._kept if each is not slot)

    def describe(self) -> list[SlotState]:
        """The slots by number. Any thread may ask."""
        states = [
            SlotState(slot.number, slot.target.position, slot.prompt, slot.is_taken, slot.loss)
            for slot in tuple(self._kept)
        ]
        return sorted(states, key=lambda state: state.number)

    def close(self) -> None:
        kept, self._kept = self._kept, []
        for slot in kept:
            slot.close()

    def _list_texts(self, chosen: Slot, owner: str) -> list[EarlierText]:
        """The texts of `owner` that slots hold or have lost. `chosen` is the slot of the request that compares them."""
        held = [
            EarlierText(slot.tokens, "own") if slot is chosen else EarlierText(_held(slot, slot.tokens), "other")
            for slot in dict.fromkeys((*self._kept, chosen))
            if slot.owner == owner
        ]
        return [*held, *(EarlierText(tokens, "given") for whose, tokens in self._given if whose == owner)]

    def _loses_much(self, slot: Slot, common: int) -> bool:
        """Whether cutting the cache to `common` tokens loses more than another slot would cost."""
        lost = len(slot.tokens) - common
        return lost > common or (self._adopts and lost > LEAST_LOSS and len(self._kept) < self.max_slots)

    def _open_another(self, free: Sequence[Slot]) -> Slot | None:
        if len(self._kept) < self.max_slots:
            try:
                slot = self._open_slot()
            except BackendError:  # no memory for one more
                if not self._kept:
                    raise
                self.max_slots = len(self._kept)
            else:
                slot.number = min({*range(len(self._kept) + 1)} - {each.number for each in self._kept})
                return slot
        return free[0] if free else None


def _held(slot: Slot, tokens: list[int]) -> list[int]:
    """What the cache holds of a text, and the token after it, which the next forward reads."""
    n = slot.target.position + 1
    return tokens if n >= len(tokens) else tokens[:n]


def open_space(slot: Slot, memory: Memory | None, use: MemoryUse | None) -> None:
    """Let the drafters of `slot` see the texts of its request's namespace, or none."""
    slot.use = use
    slot.memory.space = memory.space(use.namespace) if memory is not None and use is not None else None
    if slot.memory.space is not None:
        slot.memory.space.refresh()
        slot.memory.epoch = slot.memory.space.epoch


def restore_prefix(slot: Slot, found: SavedText | None, files: PrefixFiles | None) -> None:
    """Have a slot hold what a file has of its prompt, if that is much more than it holds. Raises BackendError."""
    target = slot.target
    if files is None or found is None or not isinstance(target, Storable) or found.common < slot.held + LEAST_TOKENS:
        return
    if not (target.can_cut or found.is_whole):  # it could only go back to nothing
        return
    if (read := files.read(found.path)) is not None and target.restore_state(*read) is False:
        found.path.unlink(missing_ok=True)  # the runtime's settings are others, though their names are the same


def store_prefix(slot: Slot, memory: Memory, files: PrefixFiles) -> None:
    """Keep the cache of a slot in a file, unless its text may not be kept or was forgotten. Raises BackendError."""
    tokens = slot.tokens[: slot.target.position]
    if slot.use is None or len(tokens) < LEAST_TOKENS or not isinstance(slot.target, Storable):
        return
    space = memory.space(slot.use.namespace)
    space.refresh()
    if space.epoch != slot.memory.epoch or (state := slot.target.save_state(FILE_BYTES)) is None:
        return
    path = files.write(slot.use.namespace, tokens, state)
    space.refresh()
    if path is not None and space.epoch != slot.memory.epoch:  # it was forgotten meanwhile
        path.unlink(missing_ok=True)


def store_text(slot: Slot, use: MemoryUse | None, prompt: list[int], emitted: list[int]) -> list[int]:
    """The text of a generation that has ended. It is kept in the memory that its drafters have seen, if any."""
    text = [*prompt, *emitted]
    space, slot.memory.space = slot.memory.space, None
    if space is not None and use is not None:
        space.add(text, len(prompt), use.source, slot.memory.epoch)
    return text
