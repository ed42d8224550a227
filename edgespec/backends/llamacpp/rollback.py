"""How a llama.cpp cache drops rejected tokens: trimming, a ring of recurrent states, or snapshot and replay."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from typing import Any

from edgespec.backends.checkpoints import Checkpoints
from edgespec.backends.llamacpp.context import Context
from edgespec.errors import RollbackError

_STATE_HINT = "Use --draft none for this model."


class Rollback(ABC):
    """How one session's cells are dropped. Positions count tokens of its sequence.

    tree       whether drafts may be trees
    max_draft  tokens of a draft that can be rolled back
    """

    tree = False
    max_draft = 2**31

    def __init__(self, api: Any, context: Context, sequence: int) -> None:
        self._api = api
        self._context = context
        self._sequence = sequence
        self._handle = context.native.handle
        self._memory = context.native.memory

    def prepare(self, position: int, n_draft: int) -> None:  # noqa: B027 - attention caches need nothing
        """A forward of 1 + n_draft rows is about to start at `position`."""

    def commit(self, position: int, end: int) -> int:
        """Trim to `position` after a forward up to `end`; returns how many tokens are left. Raises RollbackError."""
        return self._trim(position) if position < end else position

    def checkpoint(self, position: int) -> None:  # noqa: B027 - likewise: every position can be reached
        """Make `position`, the current one, reachable by `rewind`."""

    def read_to(self, position: int) -> None:  # noqa: B027 - likewise
        """A part of a prompt was read, up to `position`."""

    def rewind(self, position: int) -> int:
        """Trim to at most `position` tokens; returns how many are left. Raises RollbackError."""
        return self._trim(position)

    @abstractmethod
    def reset(self) -> None:
        """Empty the cache, in whatever state it is."""

    def _trim(self, position: int) -> int:
        """Drop the cells from `position` on. Raises RollbackError."""
        if not self._api.llama_memory_seq_rm(self._memory, self._sequence, position, -1):
            raise RollbackError(f"llama.cpp could not trim its cache to {position} tokens.", hint="Start a new chat.")
        return position


class SnapshotCache(Rollback):
    """Recurrent and hybrid models without a ring: save before a draft, restore and replay after a rejection."""

    _pending: tuple[int, Any] | None = None

    def __init__(self, api: Any, context: Context, sequence: int) -> None:
        super().__init__(api, context, sequence)
        self._checkpoints = Checkpoints[Any]()

    def prepare(self, position: int, n_draft: int) -> None:
        self._pending = (position, self._save()) if n_draft else None

    def commit(self, position: int, end: int) -> int:
        return self._restore(self._pending) if position < end else position

    def checkpoint(self, position: int) -> None:
        state = self._save()
        self._checkpoints.add(position, state, len(state))

    def read_to(self, position: int) -> None:
        if self._checkpoints.is_due(position):
            self.checkpoint(position)

    def rewind(self, position: int) -> int:
        return self._restore(self._checkpoints.cut(position))

    def reset(self) -> None:
        self._api.llama_memory_clear(self._memory, True)
        self._pending = None
        self._checkpoints.clear()

    def _save(self) -> Any:
        flags = self._api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        size = self._api.llama_state_seq_get_size_ext(self._handle, self._sequence, flags)
        buffer = (ctypes.c_uint8 * size)()
        if self._api.llama_state_seq_get_data_ext(self._handle, buffer, size, self._sequence, flags) != size:
            raise RollbackError("llama.cpp could not save its recurrent state.", hint=_STATE_HINT)
        return buffer

    def _restore(self, saved: tuple[int, Any] | None) -> int:
        if saved is None:
            self.reset()
            return 0
        position, state = saved
        flags = self._api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        if self._api.llama_state_seq_set_data_ext(self._handle, state, len(state), self._sequence, flags) == 0:
            raise RollbackError("llama.cpp could not restore its recurrent state.", hint=_STATE_HINT)
        return self._trim(position)  # restoring leaves the tail of the attention layers


class SnapshotRing(SnapshotCache):
    """Recurrent and hybrid models whose last `n_states` states llama.cpp keeps: short rollbacks need no replay."""

    def __init__(self, api: Any, context: Context, sequence: int, n_states: int) -> None:
        super().__init__(api, context, sequence)
        self.max_draft = n_states

    def prepare(self, position: int, n_draft: int) -> None:
        """The ring is filled by the decode itself."""

    commit = Rollback.commit
