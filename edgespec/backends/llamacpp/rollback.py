"""How a llama.cpp cache forgets rejected tokens: cut, a ring of recurrent states, or snapshot and replay."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from edgespec.backends.llamacpp.context import Context
from edgespec.errors import RollbackError


class Rollback(Protocol):
    """Strategy for one session. Positions count tokens of its sequence."""

    tree: bool
    max_draft: int

    def before_forward(self, position: int, n_draft: int) -> None:
        """A forward of 1 + n_draft rows is about to start at `position`."""

    def keep(self, position: int, end: int) -> int:
        """Cut to `position` after a forward that reached `end`; returns how many tokens are left, perhaps fewer."""

    def checkpoint(self, position: int) -> None:
        """Make `position`, the current one, reachable by `rewind`."""

    def rewind(self, position: int) -> int:
        """Cut to at most `position` tokens; returns how many are left."""

    def reset(self) -> None:
        """Empty the cache, whatever state it is in."""


class _Memory:
    """llama_memory calls of one context, with every return code checked."""

    def __init__(self, api: Any, context: Context, sequence: int) -> None:
        self._api = api
        self._context = context
        self._sequence = sequence
        self._native = context.native
        self._memory = api.llama_get_memory(context.native)

    def cut(self, position: int) -> bool:
        return bool(self._api.llama_memory_seq_rm(self._memory, self._sequence, position, -1))


class TrimmableCache(_Memory):
    """Attention caches: any tail can be cut, and branches of a tree are sequences that share cells."""

    tree = True
    max_draft = 2**31

    def __init__(self, api: Any, context: Context, sequence: int) -> None:
        super().__init__(api, context, sequence)
        self._branches: list[int] = []  # sequences of the branches but the first, which is the session's own

    def before_forward(self, position: int, n_draft: int) -> None:
        """Nothing to prepare."""

    def keep(self, position: int, end: int) -> int:
        if position < end and not self.cut(position):
            raise RollbackError(f"llama.cpp could not cut its cache to {position} tokens.", hint="Start a new chat.")
        return position

    def checkpoint(self, position: int) -> None:
        """Every position can be reached."""

    def rewind(self, position: int) -> int:
        return self.keep(position, position + 1)

    def open_branches(self, n: int) -> list[int]:
        """[n] sequences that share the session's cells, of which the first is its own."""
        self._branches = self._context.borrow(n - 1)
        for branch in self._branches:
            self._api.llama_memory_seq_cp(self._memory, self._sequence, branch, -1, -1)
        return [self._sequence, *self._branches]

    def keep_branch(self, winner: int, start: int, end: int, *, in_order: bool) -> int:
        """Keep positions start..end-1 of branch number `winner` as the sequence's tail, and drop all other branches.

        `in_order` says that its rows were the first of the batch. Returns how many positions are left, fewer than `end`
        where the tokens have to be run again.
        """
        if winner:
            if not self.cut(start):
                raise RollbackError("llama.cpp could not drop a rejected branch.", hint="Start a new chat.")
            self._api.llama_memory_seq_cp(self._memory, self._branches[winner - 1], self._sequence, start, end)
        self._drop_branches()
        return self.keep(end, end + 1)

    def reset(self) -> None:
        self._drop_branches()
        self.cut(-1)

    def _drop_branches(self) -> None:
        for branch in self._branches:
            self._api.llama_memory_seq_rm(self._memory, branch, -1, -1)
        self._context.give_back(self._branches)
        self._branches = []


class OrderedTrimmableCache(TrimmableCache):
    """A cut cache whose cells always lie in the order of their positions, for results that are equal to the last bit.

    A branch accepted from behind others leaves holes, which later tokens fill, and attention then adds up in another
    order: noise like that of another number of rows (logits moved by up to 0.15 on a Q8_0 model, 0.01 on f16).
    """

    def keep_branch(self, winner: int, start: int, end: int, *, in_order: bool) -> int:
        if in_order:
            return super().keep_branch(winner, start, end, in_order=True)
        return super().keep_branch(0, start, start, in_order=True)


class SnapshotCache(_Memory):
    """Recurrent and hybrid models without a ring: save before a draft, restore and replay after a rejection."""

    tree = False
    max_draft = 2**31

    def __init__(self, api: Any, context: Context, sequence: int) -> None:
        super().__init__(api, context, sequence)
        self._pending: tuple[int, Any] | None = None
        self._mark: tuple[int, Any] | None = None

    def before_forward(self, position: int, n_draft: int) -> None:
        self._pending = (position, self._save()) if n_draft else None

    def keep(self, position: int, end: int) -> int:
        if position == end:
            return end
        return self._restore(self._pending)

    def checkpoint(self, position: int) -> None:
        self._mark = (position, self._save())

    def rewind(self, position: int) -> int:
        if self._mark is not None and self._mark[0] > position:
            self._mark = None
        return self._restore(self._mark)

    def reset(self) -> None:
        self._api.llama_memory_clear(self._memory, True)
        self._pending = self._mark = None

    def _save(self) -> Any:
        flags = self._api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        size = self._api.llama_state_seq_get_size_ext(self._native, self._sequence, flags)
        buffer = (ctypes.c_uint8 * size)()
        if self._api.llama_state_seq_get_data_ext(self._native, buffer, size, self._sequence, flags) != size:
            raise RollbackError(
                "llama.cpp could not save its recurrent state.", hint="Use --draft none for this model."
            )
        return buffer

    def _restore(self, saved: tuple[int, Any] | None) -> int:
        if saved is None:
            self.reset()
            return 0
        position, state = saved
        flags = self._api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        if self._api.llama_state_seq_set_data_ext(self._native, state, len(state), self._sequence, flags) == 0:
            raise RollbackError(
                "llama.cpp could not restore its recurrent state.", hint="Use --draft none for this model."
            )
        if not self.cut(position):  # the attention half keeps its tail until told
            raise RollbackError(f"llama.cpp could not cut its cache to {position} tokens.", hint="Start a new chat.")
        return position


class SnapshotRing(SnapshotCache):
    """Recurrent and hybrid models whose last states llama.cpp keeps during a decode: short rollbacks need no replay."""

    def __init__(self, api: Any, context: Context, sequence: int, n_states: int) -> None:
        super().__init__(api, context, sequence)
        self.max_draft = n_states

    def before_forward(self, position: int, n_draft: int) -> None:
        """The ring is filled by the decode itself."""

    def keep(self, position: int, end: int) -> int:
        if position < end and not self.cut(position):
            raise RollbackError(
                f"llama.cpp could not roll back {end - position} tokens.", hint="Use a smaller --gamma."
            )
        return position
