"""A draft tree with the probability that the target emits each node."""

from __future__ import annotations

from collections.abc import Callable
from heapq import nlargest

from edgespec.core.draft_tree import DraftTree
from edgespec.core.protocols import Draft


class ScoredTree:
    """A DraftTree and the probabilities of its nodes' whole paths."""

    def __init__(self, rate: Callable[[dict[str, float]], float]) -> None:
        """`rate` maps the votes of a node to its acceptance once its parent is accepted."""
        self.tree = DraftTree()
        self._rate = rate
        self._probabilities: list[float] = []

    def __len__(self) -> int:
        return len(self.tree)

    @property
    def probabilities(self) -> list[float]:
        """[n] none higher than its parent's."""
        tree, known = self.tree, self._probabilities
        first = tree.take_changed()
        if first < len(tree) or len(known) > len(tree):
            del known[first:]
            for node in range(first, len(tree)):
                parent = tree.parents[node]
                known.append(self._rate(tree.votes[node]) * (1.0 if parent < 0 else known[parent]))
        return known

    def probability(self, node: int) -> float:
        return 1.0 if node < 0 else self.probabilities[node]

    def select(self, n: int) -> Draft:
        """The `n` most probable nodes. Their parents are among them, since no child is more probable."""
        probabilities = self.probabilities
        return self.tree.select(nlargest(n, range(len(self)), key=lambda node: (probabilities[node], -node)))
