"""A llama_context of a trained head, with one sequence."""

from __future__ import annotations

from typing import Any

from edgespec.backends.llamacpp.library import Library
from edgespec.backends.llamacpp.native import NativeContext
from edgespec.backends.llamacpp.pending import SequenceSlot
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import RollbackError

MAX_ROWS = 64  # of one call; llama.cpp reserves logits for all of them


class DraftContext:
    """What the heads' contexts share: calls of at most MAX_ROWS rows, which are cancelled as `check` says."""

    def __init__(
        self, lib: Library, model: Any, params: Any, *, vocab_size: int, check: CheckCancelled, sequence: int = 0
    ) -> None:
        """`params` have the sizes and types of the cache. Raises BackendError."""
        slot = SequenceSlot(sequence, check)
        self._api = lib.api
        self._sequence = sequence
        self._native = NativeContext(
            lib,
            model,
            params,
            vocab_size,
            max_outputs=MAX_ROWS,
            sequences=sequence + 1,
            is_cancelled=lambda: slot.is_cancelled,
            max_tokens=MAX_ROWS,
        )

    def trim(self, position: int) -> None:
        """Drop what the cache has from `position` on. Raises RollbackError."""
        if not self._api.llama_memory_seq_rm(self._native.memory, self._sequence, position, -1):
            raise RollbackError("llama.cpp could not trim the head's cache.", hint="Start a new chat.")

    def free(self) -> None:
        self._native.free()
