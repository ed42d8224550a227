"""ModelRunner of a model over its caches: a chain, or a draft tree in one of three forms.

row       one batch row; the mask says who sees whom, and rotary positions follow depth. The cheapest
nodes     a batch row for each node, all seeing the same cache. For models whose positions do not pass mx.fast.rope
branches  a batch row for each leaf, on copies of the caches. For recurrent states; copies the whole prefix

Which one a model takes is tried when it is loaded (see `probe`), for it cannot be told from its code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from edgespec.backends.mlx.caches import Caches
from edgespec.backends.mlx.keyvalues import Packing
from edgespec.backends.mlx.layout import Layout, tree_positions
from edgespec.core.protocols import Draft
from edgespec.core.tree import branches, depths, leaves, path_to

Form = Literal["row", "nodes", "branches"]


class ModelRunner:
    """A model with one sequence's caches. Scores come back as lazy arrays [rows, V]."""

    def __init__(self, model: Any, packing: Packing | None = None) -> None:
        """With empty caches, quantized where `packing` says how. Raises BackendError for caches of unknown kinds."""
        self.layout = Layout()
        self.caches = Caches(model, self.layout, packing)
        self.model = model

    def chain(self, tokens: Sequence[int]) -> Any:
        """Run `tokens`, one after another."""
        return self.rows(mx.array([list(tokens)], mx.int32))

    def rows(self, tokens: Any) -> Any:
        """The same for an array [1, n]."""
        return self.model(tokens, cache=self.caches.entries)[0]

    def tree(self, form: Form, position: int, root: int, draft: Draft) -> Any:
        """Run a root at `position` and its draft nodes. With 'branches' the caches stay as they are."""
        if form == "branches":
            return self._branches(root, draft)
        tokens = mx.array([root, *draft.tokens.tolist()], mx.int32)
        with self.layout.drafting(draft, position, by_nodes=form == "nodes") as tree:
            if form == "nodes":
                return self.model(tokens[:, None], cache=self.caches.entries)[:, 0]
            with tree_positions(tree.depth):
                return self.model(tokens[None], cache=self.caches.entries)[0]

    def _branches(self, root: int, draft: Draft) -> Any:
        ends, depth = leaves(draft), depths(draft)
        tokens = np.zeros((len(ends), int(depth.max()) + 1), np.int32)  # what pads a short branch, nothing sees
        tokens[:, 0] = root
        for branch, leaf in enumerate(ends):
            path = list(path_to(draft, leaf))
            tokens[branch, 1 : len(path) + 1] = draft.tokens[path]
        logits = self.model(mx.array(tokens), cache=self.caches.branched(len(ends)))
        member = [0, *(each[0] for each in branches(draft))]
        return logits[mx.array(member), mx.array([0, *depth.tolist()])]
