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


class TrimmableCache(Rollback):
    """Attention caches: any tail can be trimmed, and branches of a tree are sequences that share cells.

    `keeps_order`: cells lie in the order of their positions, for results that are equal to the last bit. An accepted
    branch that was not first in its batch leaves holes, which later tokens fill; attention then sums in another order:
    logits moved by up to 0.15 on a Q8_0 model, 0.01 on f16. So its tokens run again.
    """

    def __init__(self, api: Any, context: Context, sequence: int, *, keeps_order: bool) -> None:
        super().__init__(api, context, sequence)
        self._keeps_order = keeps_order
        self.tree = context.has_trees
        self._branches: list[int] = []  # ids of all branches but the first, which is the session's own

    def open_branches(self, n: int) -> list[int]:
        """[n] sequence ids that share the session's cells; the first is its own."""
        self._branches = self._context.acquire_spare(n - 1)
        for branch in self._branches:
            self._api.llama_memory_seq_cp(self._memory, self._sequence, branch, -1, -1)
        return [self._sequence, *self._branches]

    def commit_branch(self, winner: int, start: int, end: int, *, in_order: bool) -> int:
        """Keep positions start..end-1 of branch number `winner` as the sequence's tail, and drop all other branches.

        `in_order`: its rows were the first of the batch. Returns how many tokens are left: fewer than `end` where the
        rest has to run again. Raises RollbackError.
        """
        if self._keeps_order and not in_order:
            winner, end = 0, start
        if winner:
            self._trim(start)
            self._api.llama_memory_seq_cp(self._memory, self._branches[winner - 1], self._sequence, start, end)
        self._drop_branches()
        return self._trim(end)

    def reset(self) -> None:
        self._drop_branches()
        self._trim(-1)

    def _drop_branches(self) -> None:
        for branch in self._branches:
            self._api.llama_memory_seq_rm(self._memory, branch, -1, -1)
        self._context.release_spare(self._branches)
        self._branches = []


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
