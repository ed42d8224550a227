"""Sequence ids of a llama_context: one for each session, and spare ones for the branches of draft trees."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.backends.llamacpp.pending import SequenceSlot
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import BackendError

MAX_ROWS = 64  # of one session's forward: a root and 63 draft nodes
_ROWS_PER_SLOT = 8  # output rows of a shared context, where that is more
_MAX_SEQUENCES = 256  # of any llama.cpp context


class SequenceAllocator:
    """Who uses which of `count` ids: the first `slots` are for sessions, the rest are spare.

    `max_outputs` are the rows with scores that one decode of the context may have.
    """

    def __init__(self, slots: int, *, has_trees: bool) -> None:
        self.max_outputs = max(MAX_ROWS, _ROWS_PER_SLOT * slots)
        self.count = (
            min(self.max_outputs, _MAX_SEQUENCES) if has_trees else slots
        )  # llama.cpp takes no more ids than rows
        self.has_trees = has_trees
        self._free = set(range(slots))
        self._spare = list(range(slots, self.count))
        self._n_slots = slots

    @property
    def is_unused(self) -> bool:
        """Whether no session has a slot."""
        return len(self._free) == self._n_slots

    @property
    def max_nodes(self) -> int:
        """Nodes of one more draft, each of which may end a branch."""
        return min(MAX_ROWS - 1, len(self._spare)) if self.has_trees else MAX_ROWS - 1

    def acquire(self, check: CheckCancelled) -> SequenceSlot:
        """A slot for one more session, with the lowest id. Raises BackendError where all are taken."""
        if not self._free:
            raise BackendError("all caches of the model are in use.", hint="Use a larger --parallel.")
        sequence = min(self._free)
        self._free.remove(sequence)
        return SequenceSlot(sequence, check)

    def release(self, slot: SequenceSlot) -> None:
        """Its sequence is empty."""
        self._free.add(slot.sequence)

    def acquire_spare(self, n: int) -> list[int]:
        """[n] spare ids, all of whose cells are free."""
        taken, self._spare = self._spare[:n], self._spare[n:]
        return taken

    def release_spare(self, ids: Sequence[int]) -> None:
        """Their cells are free again."""
        self._spare += ids
