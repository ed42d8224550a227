"""Drafters that propose several tokens in one forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from edgespec.core.arrays import Logits
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import BlockSession, Drafter, TokenDraw
from edgespec.core.protocols import Budget
from edgespec.drafters.sampling import best_tokens


class BlockDrafter(Drafter):
    """One unit proposes a block: the tree of its most probable paths, or a drawn chain.

    The positions of a block are independent, so the probability of a path is the product of its tokens'.
    """

    def __init__(self, name: str, session: BlockSession) -> None:
        """Closes `session` when it is closed."""
        self.name = name
        self.block_size = session.block_size
        self._session = session
        self._draw: TokenDraw | None = None

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        self._draw, self.is_drawn = draw, draw is not None
        self._session.begin(text)

    def unread(self, text: Sequence[int]) -> int:
        return self._session.unread(text)

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        depth = min(limit.depth, self.block_size)
        rows = self._session.block(text, len(text) if limit.read is None else limit.read, depth)
        if rows is None:
            return
        if self._draw is not None:
            self._draw_chain(tree, text, rows, self._draw)
        else:
            self._add_best_paths(tree, rows, limit.nodes)
        yield

    def close(self) -> None:
        self._session.close()

    def _draw_chain(self, tree: DraftTree, text: Sequence[int], rows: list[Logits], draw: TokenDraw) -> None:
        prefix, parent = list(text), -1
        for logits in rows:
            token, q = draw.draw(logits, prefix)
            parent = tree.add(parent, token, self.name, float(q[token]), q)
            prefix.append(token)

    def _add_best_paths(self, tree: DraftTree, rows: list[Logits], n_nodes: int) -> None:
        """The chain of the best tokens, then up to `n_nodes` in all of the most probable paths, best first."""
        candidates = [best_tokens(logits) for logits in rows]
        tree.add_chain([tokens[0] for tokens, _ in candidates], self.name, [p[0] for _, p in candidates])
        heap: list[tuple[float, int, int, int]] = []  # (-probability of the path, its parent, depth, rank)
        heappush(heap, (-candidates[0][1][0], -1, 0, 0))
        added = 0
        while heap and added < n_nodes:
            negated, parent, depth, rank = heappop(heap)
            tokens, probabilities = candidates[depth]
            node = tree.add(parent, tokens[rank], self.name, probabilities[rank])
            added += 1
            if rank + 1 < len(tokens):
                sibling = negated / probabilities[rank] * probabilities[rank + 1]
                heappush(heap, (sibling, parent, depth, rank + 1))
            if depth + 1 < len(candidates):
                heappush(heap, (negated * candidates[depth + 1][1][0], node, depth + 1, 0))
