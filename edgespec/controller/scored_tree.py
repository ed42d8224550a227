"""A draft tree with the probability that the target emits each node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import nlargest

from edgespec.core.draft_tree import DraftTree
from edgespec.core.protocols import Draft


class ScoredTree:
    """A DraftTree and the probabilities of its nodes' whole paths."""

    def __init__(self, rate: Callable[[dict[str, float]], float], *, is_chain: bool = False) -> None:
        """`rate` maps the votes of a node to its acceptance once its parent is accepted.

        `is_chain`: the target takes no branches, so that only the most probable child of each node may be verified.
        """
        self.tree = DraftTree()
        self._rate = rate
        self._is_chain = is_chain
        self._probabilities: list[float] = []

    def __len__(self) -> int:
        return len(self.tree)

    @property
    def probabilities(self) -> list[float]:
        """Of the nodes that may be verified; none higher than its parent's."""
        known = self._score()
        return [known[node] for node in self._list_path()] if self._is_chain else known

    def probability(self, node: int) -> float:
        return 1.0 if node < 0 else self._score()[node]

    def select(self, n: int) -> Draft:
        """The `n` most probable nodes. Their parents are among them, since no child is more probable."""
        return self.tree.select(self._choose(n))

    def path_tokens(self, n: int) -> list[int]:
        """Those of the most probable path among the `n` most probable nodes."""
        chosen = {*self._choose(n)}
        return [self.tree.tokens[node] for node in self._list_path() if node in chosen]

    def _choose(self, n: int) -> Sequence[int]:
        if self._is_chain:
            return self._list_path()[:n]
        if n >= len(self):
            return range(len(self))
        known = self._score()
        return nlargest(n, range(len(self)), key=lambda node: (known[node], -node))

    def _list_path(self) -> list[int]:
        """The most probable child of the root, its most probable child, and so on."""
        known, path = self._score(), [-1]
        while children := [node for node, parent in enumerate(self.tree.parents) if parent == path[-1]]:
            path.append(max(children, key=lambda node: (known[node], -node)))
        return path[1:]

    def _score(self) -> list[float]:
        """[n]"""
        tree, known = self.tree, self._probabilities
        first = tree.take_changed()
        if first < len(tree) or len(known) > len(tree):
            del known[first:]
            for node in range(first, len(tree)):
                parent = tree.parents[node]
                known.append(self._rate(tree.votes[node]) * (1.0 if parent < 0 else known[parent]))
        return known
