"""Drafters that propose several tokens in one forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgespec.core.arrays import Logits
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import BlockSession, TokenDraw
from edgespec.core.protocols import Budget
from edgespec.drafters.candidates import best_tokens
from edgespec.drafters.sequential import SessionDrafter


class BlockDrafter(SessionDrafter):
    """One unit proposes a block: the tree of its most probable paths, or a drawn chain.

    Positions are independent, so that probabilities multiply.
    """

    _session: BlockSession

    def __init__(self, name: str, session: BlockSession) -> None:
        super().__init__(name, session)
        self.block_size = session.block_size

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

    def _draw_chain(self, tree: DraftTree, text: Sequence[int], rows: list[Logits], draw: TokenDraw) -> None:
        prefix, parent = list(text), -1
        for logits in rows:
            token, q = draw.draw(logits, prefix)
            parent = tree.add(parent, token, self.name, float(q[token]), q)
            prefix.append(token)

    def _add_best_paths(self, tree: DraftTree, rows: list[Logits], n_nodes: int) -> None:
        """The chain of the best tokens, then up to `n_nodes` in all of the most probable paths, best first."""
        best = []
        for row in rows:
            tokens, probabilities = best_tokens(row)
            best.append(list(zip(tokens, probabilities, tokens, strict=True)))
        node = -1
        for (token, probability, _), *_ in best:
            node = tree.add(node, token, self.name, probability)
        tree.add_most_probable(self.name, Budget(len(rows), n_nodes), lambda _, depth: best[depth], -1)
