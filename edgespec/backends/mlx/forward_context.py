"""The forward that is being built: a chain, a tree in one batch row, or a tree with a batch row for each node."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.core.protocols import Draft
from edgespec.core.tree import depths, path_to

POLL_ROWS = 32  # forwards of at least so many rows run layer by layer and can be cancelled in between


@dataclass(frozen=True, slots=True)
class TreeRows:
    """A root at `position` and its n draft nodes.

    depth       [n + 1] below the root
    mask        [n + 1, n + 1] which rows each row attends to
    is_batched  each row is a batch row of its own
    """

    position: int
    depth: Any
    mask: Any
    is_batched: bool

    @staticmethod
    def from_draft(draft: Draft, position: int, *, is_batched: bool) -> TreeRows:
        n = len(draft) + 1
        mask = np.zeros((n, n), bool)
        mask[:, 0] = True
        for node in range(len(draft)):
            mask[node + 1, [0, *(each + 1 for each in path_to(draft, node))]] = True
        depth = mx.array(np.concatenate([[0], depths(draft)]).astype(np.int32))
        return TreeRows(position, depth, mx.array(mask), is_batched)


class ForwardContext:
    """What the caches of a session need to know of the forward that is being built."""

    def __init__(self) -> None:
        self.tree: TreeRows | None = None
        self.poll: Callable[[], None] | None = None

    @contextlib.contextmanager
    def build_tree(self, draft: Draft, position: int, *, is_batched: bool) -> Iterator[TreeRows]:
        """While the forward of a tree is built."""
        self.tree = TreeRows.from_draft(draft, position, is_batched=is_batched)
        try:
            yield self.tree
        finally:
            self.tree = None

    @contextlib.contextmanager
    def poll_layers(self, poll: Callable[[], None]) -> Iterator[None]:
        """While a prefill is built: each layer is evaluated when its cache is updated, then `poll` may raise."""
        self.poll = poll
        try:
            yield
        finally:
            self.poll = None

    def update(self, *arrays: Any) -> None:
        """A cache was updated with these arrays of its layer."""
        if self.poll is not None and arrays[0].shape[-2] >= POLL_ROWS:
            mx.eval(*arrays)
            self.poll()

    def mask(self, cached: int, window: int | None) -> Any:
        """[n, cached + n] what the n tree rows attend to of the last `cached` tokens and of each other.

        Only the last `window` positions, where there is one. [n, 1, 1, cached + n] where each row is a batch row.
        """
        tree = self.tree
        assert tree is not None
        mask = mx.concatenate([mx.ones((tree.depth.size, cached), mx.bool_), tree.mask], axis=1)
        if window is not None:
            queries = tree.position + tree.depth
            keys = mx.concatenate([mx.arange(tree.position - cached, tree.position), queries])
            mask = mask & (queries[:, None] - keys[None] < window)
        return mask[:, None, None] if tree.is_batched else mask


_rope = mx.fast.rope


@contextlib.contextmanager
def tree_positions(depth: Any) -> Iterator[None]:
    """Inside, rotary embeddings place n rows at offset + `depth` [n] instead of one after another.

    mx.fast.rope takes one offset for each batch row, so the rows are folded into the batch.
    """

    def rope(x: Any, dims: int, *, offset: Any, **kwargs: Any) -> Any:
        rows, width = x.shape[-2:]
        if rows != depth.size:
            return _rope(x, dims, offset=offset, **kwargs)
        batch = x.shape[0]
        folded = x.reshape(batch, -1, rows, width).transpose(0, 2, 1, 3).reshape(batch * rows, -1, 1, width)
        positions = offset + depth
        if batch > 1:
            positions = mx.tile(positions, batch)
        rotated = _rope(folded, dims, offset=positions, **kwargs)
        return rotated.reshape(batch, rows, -1, width).transpose(0, 2, 1, 3).reshape(x.shape)

    mx.fast.rope = rope
    try:
        yield
    finally:
        mx.fast.rope = _rope
