"""Where a session's keys and values lie, and their copies as bytes in llama.cpp's format."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from edgespec.backends.llamacpp.context import Context
from edgespec.backends.llamacpp.rollback import Rollback
from edgespec.backends.llamacpp.scores import SequenceSlot


@dataclass(frozen=True)
class Cells:
    """The cells of one sequence of a context, and how their tail is dropped."""

    context: Context
    slot: SequenceSlot
    rollback: Rollback

    @property
    def sequence(self) -> int:
        return self.slot.sequence

    @property
    def is_copying(self) -> bool:
        """Whether the next decode copies from or to them, so that they cannot be read or written before it."""
        streams = self.context.streams
        return streams is not None and self.sequence in streams.copying

    def read(self, api: Any, limit: int | None = None) -> memoryview | None:
        """A copy, as a context without streams has it; None if there is nothing to read, or more than `limit` bytes."""
        handle, streams = self.context.native.handle, self.context.streams
        size = 0 if self.is_copying else api.llama_state_seq_get_size(handle, self.sequence)
        if not size or (limit is not None and size > limit):
            return None
        saved = bytearray(size)
        buffer = (ctypes.c_uint8 * size).from_buffer(saved)
        if api.llama_state_seq_get_data(handle, buffer, size, self.sequence) != size:
            return None
        return memoryview(saved) if streams is None else streams.cut_state(saved, self.sequence)

    def write(self, api: Any, state: memoryview) -> bool:
        """Put what `read` has returned into these empty cells; returns whether it could. `state` is writable."""
        if self.context.streams is not None:
            state = self.context.streams.pad_state(state)
        buffer = (ctypes.c_uint8 * len(state)).from_buffer(state)
        return bool(api.llama_state_seq_set_data(self.context.native.handle, buffer, len(state), self.sequence))
