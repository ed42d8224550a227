"""Forwards of a model over its caches: a chain, or a draft tree in one of three layouts.

row       one batch row with a tree mask; rotary positions follow depth. The cheapest layout
nodes     a batch row for each node over the same cache, for models whose positions do not pass through mx.fast.rope
branches  a batch row for each leaf over copies of the caches, for recurrent states. Copies the whole prefix

`probe` tries the layouts when a model is loaded, because the code of a model does not tell which ones it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from edgespec.backends.mlx.caches import Caches
from edgespec.backends.mlx.forward_context import ForwardContext, tree_positions
from edgespec.backends.mlx.keyvalues import KVQuantization
from edgespec.backends.mlx.taps import FeatureTap
from edgespec.core.protocols import Draft
from edgespec.core.tree import branches, depths, leaves, path_to

TreeLayout = Literal["row", "nodes", "branches"]


class ModelRunner:
    """A model with the caches of one sequence. Scores are lazy arrays [rows, V].

    Where there is a `tap`, `features` are those of the last forward, lazy as well: [rows, width].
    """

    def __init__(self, model: Any, quantization: KVQuantization | None = None) -> None:
        """With empty caches, quantized by `quantization`. Raises BackendError for caches of unknown classes."""
        self.context = ForwardContext()
        self.caches = Caches(model, self.context, quantization)
        self.model = model
        self.tap: FeatureTap | None = None
        self.features: Any = None

    def run_chain(self, tokens: Sequence[int]) -> Any:
        """Run `tokens` one after another."""
        return self.run(mx.array([list(tokens)], mx.int32))

    def run(self, tokens: Any) -> Any:
        """Run the tokens of an array [1, n] one after another."""
        return self._run(tokens, self.caches.entries, lambda rows: rows[0])

    def run_tree(self, tree_layout: TreeLayout, position: int, root: int, draft: Draft) -> Any:
        """Run a root at `position` and its draft nodes. With 'branches' the caches do not change."""
        if tree_layout == "branches":
            return self._run_branches(root, draft)
        tokens = mx.array([root, *draft.tokens.tolist()], mx.int32)
        with self.context.build_tree(draft, position, is_batched=tree_layout == "nodes") as tree:
            if tree_layout == "nodes":
                return self._run(tokens[:, None], self.caches.entries, lambda rows: rows[:, 0])
            with tree_positions(tree.depth):
                return self.run(tokens[None])

    def _run_branches(self, root: int, draft: Draft) -> Any:
        ends, depth = leaves(draft), depths(draft)
        tokens = np.zeros((len(ends), int(depth.max()) + 1), np.int32)  # nothing attends to the padding
        tokens[:, 0] = root
        for branch, leaf in enumerate(ends):
            path = list(path_to(draft, leaf))
            tokens[branch, 1 : len(path) + 1] = draft.tokens[path]
        at = mx.array([0, *(each[0] for each in branches(draft))]), mx.array([0, *depth.tolist()])
        return self._run(mx.array(tokens), self.caches.branch(len(ends)), lambda rows: rows[at])

    def _run(self, tokens: Any, entries: list[Any], select: Callable[[Any], Any]) -> Any:
        """Scores [rows, V] of tokens [batch, n]; `select` picks the rows of arrays [batch, n, *]."""
        if self.tap is None:
            return select(self.model(tokens, cache=entries))
        logits, features = self.tap.run(self.model, tokens, entries)
        self.features = select(features)
        return select(logits)
