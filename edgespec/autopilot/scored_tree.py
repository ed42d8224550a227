"""A draft tree with the probability that the target emits each node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import nlargest

from edgespec.core.draft_tree import DraftTree
from edgespec.core.protocols import Draft

_MAX_RATE = 0.999  # the most that one drafter's rates for other tokens in place of a token may add up to


class ScoredTree:
    """A DraftTree and the probabilities of its nodes' whole paths."""

    def __init__(self, rate: Callable[[dict[str, float]], float], *, is_chain: bool = False) -> None:
        """`rate` maps the votes of a node to its acceptance once its parent is accepted.

        `is_chain`: the target takes no branches, so that only the most probable child of each node may be verified.
        """
        self.tree = DraftTree()
        self._rate = rate
        self._is_chain = is_chain
        self._rates: list[float] = []  # of the nodes' votes
        self._probabilities: list[float] = []

    def __len__(self) -> int:
        return len(self.tree)

    @property
    def probabilities(self) -> list[float]:
        """Probabilities of the nodes that may be verified; none is higher than its parent's."""
        known = self._score()
        return [known[node] for node in self._list_path()] if self._is_chain else known

    def probability(self, node: int) -> float:
        return 1.0 if node < 0 else self._score()[node]

    def select(self, n: int) -> Draft:
        """The `n` most probable nodes. Their parents are among them, since no child is more probable."""
        return self.tree.select(self._choose(n))

    def path_tokens(self, n: int) -> list[int]:
        """Tokens of the most probable path among the `n` most probable nodes."""
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
        while children := self.tree.children(path[-1]):
            path.append(max(children, key=lambda node: (known[node], -node)))
        return path[1:]

    def _score(self) -> list[float]:
        """[n] the probability of each node, of which only those that may have changed are computed anew."""
        tree, rates, known = self.tree, self._rates, self._probabilities
        first = tree.take_changed()
        if first < len(tree) or len(known) > len(tree):
            del known[first:], rates[first:]
            rates += map(self._rate, tree.votes[first:])
            for node in range(first, len(tree)):
                parent, rate = tree.parents[node], rates[node]
                if len(siblings := tree.children(parent)) > 1:
                    rate = self._contest(node, siblings)
                known.append(rate * (1.0 if parent < 0 else known[parent]))
        return known

    def _contest(self, node: int, siblings: Sequence[int]) -> float:
        """The rate of `node`, lowered where other drafters propose its `siblings` instead of it.

        At most one token is right, and drafters are assumed to err independently. Then the node is right with

            odds / (1 + odds + sum of the others' odds),    odds = p / (1 - p)

        where p of the node is its rate alone, and p of another drafter the summed rates of its tokens beside the node.
        The 1 stands for none of them.
        """
        rate, votes = self._rates[node], self.tree.votes
        own = votes[node]
        others: dict[str, float] = {}
        for each in siblings:
            name = next(iter(votes[each]))
            if name not in own and own.keys().isdisjoint(votes[each]):
                others[name] = others.get(name, 0.0) + self._rates[each]
        bounded = [min(each, _MAX_RATE) for each in others.values()]
        odds = sum([p / (1.0 - p) for p in bounded])
        return rate / (1.0 + (1.0 - rate) * odds)
