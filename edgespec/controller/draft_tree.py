"""The tree of drafted tokens, each with the probability that the target emits it."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest

import numpy as np

from edgespec.core.protocols import Draft


class DraftTree:
    """A trie of drafted tokens below the root (-1). A node's probability is that of its whole path."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.probabilities: list[float] = []
        self._child: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, rate: float) -> int:
        """Add `token` after `parent`, accepted with probability `rate` once `parent` is; returns its node.

        If two drafters propose the same node, it keeps the higher probability.
        """
        probability = self.probability(parent) * rate
        known = self._child.get((parent, token))
        if known is not None:
            self.probabilities[known] = max(self.probabilities[known], probability)
            return known
        node = self._child[parent, token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.probabilities.append(probability)
        return node

    def add_chain(self, tokens: Sequence[int], rates: Sequence[float], parent: int = -1) -> int:
        """Add each token below the one before; returns the last node."""
        for token, rate in zip(tokens, rates, strict=True):
            parent = self.add(parent, token, rate)
        return parent

    def probability(self, node: int) -> float:
        return 1.0 if node < 0 else self.probabilities[node]

    def select_draft(self, n: int) -> Draft:
        """The `n` most probable nodes. Their parents are among them, since no child is more probable."""
        kept = sorted(nlargest(n, range(len(self.tokens)), key=lambda node: (self.probabilities[node], -node)))
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        tokens = np.array([self.tokens[node] for node in kept], np.int32)
        return Draft(tokens, np.array([place[self.parents[node]] for node in kept], np.int32))
