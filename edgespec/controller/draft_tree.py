"""Drafted tokens with the probability that the target will reach and emit each: the best of them fill the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
        """The node of `token` after `parent`, where it is right with `rate`; of two drafters' rates the higher one."""
        before = 1.0 if parent < 0 else self.probabilities[parent]
        known = self._child.get((parent, token))
        if known is not None:
            self.probabilities[known] = max(self.probabilities[known], before * rate)
            return known
        node = self._child[parent, token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.probabilities.append(before * rate)
        return node

    def chain(self, tokens: Sequence[int], rates: Sequence[float], parent: int = -1) -> int:
        """Add one token after another; returns the last node."""
        for token, rate in zip(tokens, rates, strict=True):
            parent = self.add(parent, token, rate)
        return parent

    def probability(self, node: int) -> float:
        return 1.0 if node < 0 else self.probabilities[node]

    def draft(self, n: int) -> Draft:
        """The `n` most probable nodes. Parents are among them, since no child is more probable."""
        kept = sorted(nlargest(n, range(len(self.tokens)), key=lambda node: (self.probabilities[node], -node)))
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        tokens = np.array([self.tokens[node] for node in kept], np.int32)
        return Draft(tokens, np.array([place[self.parents[node]] for node in kept], np.int32))


@dataclass(frozen=True, slots=True)
class DraftSize:
    """So many draft nodes to verify: tokens expected of the round, and its seconds, drafting included."""

    nodes: int
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    def value(self, price: float) -> float:
        """In tokens, where a second costs `price` of them."""
        return self.tokens - price * self.seconds


def sizes(
    probabilities: Sequence[float], verify_s: Callable[[int], float], drafted_s: float, most: int
) -> list[DraftSize]:
    """Every number of the most probable nodes from none to `most`; `verify_s` takes the rows of a forward.

    None is left out, since cost curves step up and down.
    """
    tokens = 1.0
    found = [DraftSize(0, tokens, drafted_s + verify_s(1))]
    for n, probability in enumerate(sorted(probabilities, reverse=True)[:most], 1):
        tokens += probability
        found.append(DraftSize(n, tokens, drafted_s + verify_s(n + 1)))
    return found


def best_size(rows: Sequence[DraftSize], recent_rate: float) -> tuple[DraftSize, float]:
    """The rows of most value, and the price of a second in tokens that makes them so.

    A second costs what the fastest of them makes of one, or what rounds have made of it (`recent_rate`): what is
    not drafted now can be drafted in the next round, when more is known.
    """
    price = max(recent_rate, max(each.speed for each in rows))
    return max(rows, key=lambda each: each.value(price)), price
