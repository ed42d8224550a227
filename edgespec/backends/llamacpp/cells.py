"""Keep the keys and values of a session as cells, and copy them as bytes in llama.cpp's format."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import psutil

from edgespec.backends.llamacpp.context import Context
from edgespec.backends.llamacpp.rollback import Rollback
from edgespec.backends.llamacpp.scores import SequenceSlot

_FREE_SHARE = 0.3  # share of the free memory that a copy may take; for a context with streams a second one is made


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
        """A copy, in the format of a context without streams.

        None if there is nothing to read, or if it takes more than `limit` bytes or `_FREE_SHARE` of the free memory.
        """
        handle, streams = self.context.native.handle, self.context.streams
        size = 0 if self.is_copying else api.llama_state_seq_get_size(handle, self.sequence)
        if not 0 < size <= min(_FREE_SHARE * psutil.virtual_memory().available, size if limit is None else limit):
            return None
        try:
            saved = bytearray(size)
        except MemoryError:
            return None
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
