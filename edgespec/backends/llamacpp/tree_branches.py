"""Branches of a draft tree, which are sequences that share the cells of an attention cache."""

from __future__ import annotations

from typing import Any

from edgespec.backends.llamacpp.context import Context
from edgespec.backends.llamacpp.rollback import Rollback


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

        `in_order`: its rows were the first of the batch. Returns how many tokens are left: fewer than `end` if the
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
