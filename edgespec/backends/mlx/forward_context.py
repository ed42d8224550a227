"""How the rows of one forward lie: a chain, a tree in one batch row, or a tree with a batch row for each node."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.core.protocols import Draft
from edgespec.core.tree import depths, path_to

POLL_ROWS = 32  # forwards of at least so many rows are evaluated layer by layer, and can be cancelled in between


@dataclass(frozen=True, slots=True)
class TreeRows:
    """A root at `position` and its draft nodes: depth [n + 1] below the root, who sees whom [n + 1, n + 1] of them.

    `by_nodes`: each of them is a batch row, instead of a row of one.
    """

    position: int
    depth: Any
    sees: Any
    by_nodes: bool

    @staticmethod
    def of(draft: Draft, position: int, *, by_nodes: bool) -> TreeRows:
        n = len(draft) + 1
        sees = np.zeros((n, n), bool)
        sees[:, 0] = True
        for node in range(len(draft)):
            sees[node + 1, [0, *(each + 1 for each in path_to(draft, node))]] = True
        depth = mx.array(np.concatenate([[0], depths(draft)]).astype(np.int32))
        return TreeRows(position, depth, mx.array(sees), by_nodes)


class Layout:
    """Shared by all caches of a session: what the forward that is being built looks like."""

    def __init__(self) -> None:
        self.tree: TreeRows | None = None
        self.poll: Callable[[], None] | None = None

    @contextlib.contextmanager
    def drafting(self, draft: Draft, position: int, *, by_nodes: bool) -> Iterator[TreeRows]:
        """While a tree's forward is built."""
        self.tree = TreeRows.of(draft, position, by_nodes=by_nodes)
        try:
            yield self.tree
        finally:
            self.tree = None

    @contextlib.contextmanager
    def polling(self, poll: Callable[[], None]) -> Iterator[None]:
        """While a prefill is built: caches evaluate what they are given, and `poll` may raise between layers."""
        self.poll = poll
        try:
            yield
        finally:
            self.poll = None

    def reached(self, *arrays: Any) -> None:
        """A cache was given these arrays of a layer."""
        if self.poll is not None and arrays[0].shape[-2] >= POLL_ROWS:
            mx.eval(*arrays)
            self.poll()

    def mask(self, cached: int, window: int | None) -> Any:
        """[n, cached + n], for tree rows over the last `cached` tokens: who sees whom, at most `window` positions back.

        [n, 1, 1, cached + n] where each node is a batch row.
        """
        tree = self.tree
        assert tree is not None
        mask = mx.concatenate([mx.ones((tree.depth.size, cached), mx.bool_), tree.sees], axis=1)
        if window is not None:
            at = tree.position + tree.depth
            of = mx.concatenate([mx.arange(tree.position - cached, tree.position), at])
            mask = mask & (at[:, None] - of[None] < window)
        return mask[:, None, None] if tree.by_nodes else mask


_rope = mx.fast.rope


@contextlib.contextmanager
def tree_positions(depth: Any) -> Iterator[None]:
    """Rotary embeddings of rows that stand at offset + `depth` [n], instead of one after another.

    mx.fast.rope takes one offset for each batch row, so the rows are folded into the batch for its duration. Only what
    is built inside the block is affected.
    """

    def rope(x: Any, dims: int, *, offset: Any, **given: Any) -> Any:
        rows, width = x.shape[-2:]
        if rows != depth.size:
            return _rope(x, dims, offset=offset, **given)
        batch = x.shape[0]
        folded = x.reshape(batch, -1, rows, width).transpose(0, 2, 1, 3).reshape(batch * rows, -1, 1, width)
        at = offset + depth
        turned = _rope(folded, dims, offset=mx.tile(at, batch) if batch > 1 else at, **given)
        return turned.reshape(batch, rows, -1, width).transpose(0, 2, 1, 3).reshape(x.shape)

    mx.fast.rope = rope
    try:
        yield
    finally:
        mx.fast.rope = _rope
