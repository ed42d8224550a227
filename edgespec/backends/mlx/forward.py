"""The forward that is being built: a chain, or a tree whose rows follow each other in one batch row."""

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
    """A root at `position` and its draft nodes: m rows, of which a forward has the last n, and the cache the others.

    depth  [m] below the root
    mask   [n, m] which rows each row attends to
    """

    position: int
    depth: Any
    mask: Any

    @staticmethod
    def from_draft(draft: Draft, position: int) -> TreeRows:
        n = len(draft) + 1
        mask = np.zeros((n, n), bool)
        mask[:, 0] = True
        for node in range(len(draft)):
            mask[node + 1, [0, *(each + 1 for each in path_to(draft, node))]] = True
        depth = mx.array(np.concatenate([[0], depths(draft)]).astype(np.int32))
        return TreeRows(position, depth, mx.array(mask))


class ForwardContext:
    """What the caches of a session need to know of the forward that is being built."""

    def __init__(self) -> None:
        self.tree: TreeRows | None = None
        self.poll: Callable[[], None] | None = None

    @contextlib.contextmanager
    def build(self, tree: TreeRows | None = None, poll: Callable[[], None] | None = None) -> Iterator[None]:
        """While the forward of a tree is built, or one where `poll` may raise whenever a layer has been evaluated."""
        self.tree, self.poll = tree, poll
        try:
            yield
        finally:
            self.tree = self.poll = None

    def update(self, *arrays: Any) -> None:
        """A cache was updated with these arrays of its layer."""
        if self.poll is not None and arrays[0].shape[-2] >= POLL_ROWS:
            mx.eval(*arrays)
            self.poll()

    def mask(self, cached: int, window: int | None) -> Any:
        """[n, cached + n] what n tree rows attend to of the last `cached` rows and each other, in a `window`."""
        tree = self.tree
        assert tree is not None
        n, m = tree.mask.shape
        n_text = cached + n - m
        mask = mx.concatenate([mx.ones((n, n_text), mx.bool_), tree.mask], axis=1)
        if window is not None:
            rows = tree.position + tree.depth
            keys = mx.concatenate([mx.arange(tree.position - n_text, tree.position), rows])
            mask = mask & (rows[m - n :, None] - keys[None] < window)
        return mask


_rope = mx.fast.rope


@contextlib.contextmanager
def tree_positions(depth: Any) -> Iterator[None]:
    """Inside, rotary embeddings place n rows, folded into the batch, at offset + `depth` [n]."""

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
