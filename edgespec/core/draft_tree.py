"""The tokens that all drafters of a round have proposed together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import isfinite
from typing import TypeVar

import numpy as np

from edgespec.core.arrays import Probs
from edgespec.core.protocols import NO_DRAFT, Budget, Draft

S = TypeVar("S")


class DraftTree:
    """A trie of drafted tokens below the root (-1), in topological order.

    A token that several drafters propose at one place is one node with a vote of each of them.

    tokens   [n] ids
    parents  [n] nodes; -1 is the root
    depths   [n] 1 for children of the root
    votes    [n] the confidence of each drafter that proposed the node, by the drafter's name
    q        [n] the distribution [V] that the token was drawn from; None for a deterministic proposal
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.votes: list[dict[str, float]] = []
        self.q: list[Probs | None] = []
        self.voter: str | None = None  # the drafter whose turn it is; None for anybody's
        self._child: dict[tuple[int, int], int] = {}
        self._children: dict[int, list[int]] = {}  # by parent
        self._first_changed = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, source: str, confidence: float, q: Probs | None = None) -> int:
        """Vote for `token` below `parent` in the name of `source`; returns its node, which is added if it is new.

        If a drafter votes twice for a node, the higher confidence counts. Raises ValueError for a parent that does not
        exist, a confidence that is no finite number, and a source other than `voter`.
        """
        if not -1 <= parent < len(self.tokens):
            raise ValueError(f"it proposed token {token} below node {parent}, which does not exist")
        if not isfinite(confidence) or (self.voter is not None and self.voter != source):
            raise ValueError(f"it votes as '{source}' with confidence {confidence}")
        node = self._child.get((parent, token))
        if node is None:
            node = self._child[parent, token] = len(self.tokens)
            self._children.setdefault(parent, []).append(node)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
            self.votes.append({source: confidence})
            self.q.append(q)
        else:
            self.votes[node][source] = max(confidence, self.votes[node].get(source, confidence))
        if (first := self._children[parent][0]) < self._first_changed:
            self._first_changed = first
        return node

    def add_chain(self, tokens: Sequence[int], source: str, confidences: Sequence[float], parent: int = -1) -> int:
        """Add each token below the one before; returns the last node. Raises ValueError as `add` does."""
        for token, confidence in zip(tokens, confidences, strict=True):
            parent = self.add(parent, token, source, confidence)
        return parent

    def add_most_probable(
        self,
        source: str,
        limit: Budget,
        follow: Callable[[S, int], Iterable[tuple[int, float, S]]],
        start: S,
        least: float = 0.0,
    ) -> None:
        """Add the `limit.nodes` nodes whose paths are the most probable, without those less probable than `least`.

        `follow(state, depth)` lists what may come after a path of `depth` tokens, as (token, its probability after that
        path, the state of the longer path); `start` is the root's state.
        """
        waiting: list[tuple[float, int, int, int, int, float, S]] = []
        order = count()

        def wait(reached: float, parent: int, depth: int, state: S) -> None:
            for token, probability, below in follow(state, depth) if depth < limit.depth else ():
                if reached * probability >= least:
                    path = -reached * probability
                    heappush(waiting, (path, next(order), parent, depth + 1, token, probability, below))

        wait(1.0, -1, 0, start)
        for _ in range(limit.nodes):
            if not waiting:
                return
            path, _, parent, depth, token, probability, below = heappop(waiting)
            wait(-path, self.add(parent, token, source, probability), depth, below)

    def take_changed(self) -> int:
        """The first node whose votes or siblings may have changed since the last call; `len(self)` if there is none."""
        first, self._first_changed = self._first_changed, len(self.tokens)
        return first

    def truncate(self, n: int) -> None:
        for node in range(len(self) - 1, n - 1, -1):
            parent = self.parents[node]
            del self._child[parent, self.tokens[node]]
            siblings = self._children[parent]
            siblings.pop()
            self._first_changed = min(self._first_changed, *siblings[:1], node)
        for values in (self.tokens, self.parents, self.depths, self.votes, self.q):
            del values[n:]

    def children(self, parent: int) -> Sequence[int]:
        """The child nodes, in the order in which they were added."""
        return self._children.get(parent, ())

    def proposals(self, parent: int, source: str) -> list[int]:
        """The children of `parent` that `source` has proposed, the most confident first."""
        found = [node for node in self.children(parent) if source in self.votes[node]]
        return sorted(found, key=lambda node: -self.votes[node][source])

    def path_tokens(self, node: int) -> list[int]:
        """[depth] the tokens from the root's child down to `node`."""
        found: list[int] = []
        while node >= 0:
            found.append(self.tokens[node])
            node = self.parents[node]
        return found[::-1]

    def deepest(self, source: str) -> int:
        """The deepest node that `source` has proposed; among equally deep ones, the end of its most confident path.

        -1 if it has proposed none.
        """
        nodes = [node for node, votes in enumerate(self.votes) if source in votes]
        most = max((self.depths[node] for node in nodes), default=0)
        deepest = [node for node in nodes if self.depths[node] == most]
        if len(deepest) < 2:
            return deepest[0] if deepest else -1
        return max(deepest, key=lambda node: (self._path_confidence(node, source), -node))

    def _path_confidence(self, node: int, source: str) -> float:
        """The product of the confidences of `source` in what it has proposed on the path to `node`."""
        reached = 1.0
        while node >= 0:
            reached *= self.votes[node].get(source, 1.0)
            node = self.parents[node]
        return reached

    def select(self, nodes: Collection[int]) -> Draft:
        """A deterministic draft of `nodes`; the parent of each must be among them."""
        if not nodes:
            return NO_DRAFT
        kept = sorted(nodes)
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        return Draft(
            np.array([self.tokens[node] for node in kept], np.int32),
            np.array([place[self.parents[node]] for node in kept], np.int32),
            drafters=tuple("+".join(self.votes[node]) for node in kept),
        )

    def drawn(self) -> Draft:
        """The whole tree as a drawn draft with q [n, V]. Raises ValueError if a token was not drawn.

        No node is left out, since dropping a token because of its value would change the output distribution.
        """
        q = [each for each in self.q if each is not None]
        if len(q) != len(self):
            raise ValueError("only drawn tokens can be verified as drawn")
        if not q:
            return NO_DRAFT
        drafters = tuple("+".join(votes) for votes in self.votes)
        return Draft(np.array(self.tokens, np.int32), np.array(self.parents, np.int32), np.stack(q), drafters)
