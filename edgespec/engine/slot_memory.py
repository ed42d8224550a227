"""What a generation may use of the memory of earlier texts, and what it leaves there."""

from __future__ import annotations

from collections.abc import Iterator

from edgespec.engine.events import MemoryUse
from edgespec.engine.session_pool import Slot
from edgespec.memory.memory import Memory


def begin_text(slot: Slot, memory: Memory | None, use: MemoryUse | None) -> None:
    """Let the drafters of `slot` see the texts of its request's namespace, or none."""
    slot.memory.space = memory.space(use.namespace) if memory is not None and use is not None else None
    if slot.memory.space is not None:
        slot.memory.space.refresh()
        slot.memory.epoch = slot.memory.space.epoch


def keep_text(slot: Slot, use: MemoryUse | None, prompt: list[int], emitted: list[int]) -> list[int]:
    """The text of a generation that has ended. It is kept in the memory that its drafters have seen, if any."""
    text = [*prompt, *emitted]
    space, slot.memory.space = slot.memory.space, None
    if space is not None and use is not None:
        space.add(text, len(prompt), use.source, slot.memory.epoch)
    return text


def take_notices(memory: Memory | None) -> Iterator[str]:
    """Sentences for the user, each once: that texts cannot be stored, and why."""
    while memory is not None and (notice := memory.take_notice()):
        yield notice
