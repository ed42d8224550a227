"""Forwards of a model over its caches, whose hidden states are kept if a head reads them.

A forward has a chain, or a draft tree in one batch row with a mask, whose rotary positions follow the depth. `probe`
tries one when a model is loaded, because its code does not tell whether it takes trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.features import Features
from edgespec.backends.head_session import check_tapped_layers
from edgespec.backends.mlx.caches import Caches, KVQuantization
from edgespec.backends.mlx.forward import ForwardContext, TreeRows, tree_positions
from edgespec.backends.mlx.hooks import TRUNK, LayerHooks
from edgespec.core.protocols import Draft


class FeatureTap:
    """Reads the hidden states of some layers in forwards of one model; `kept` are those of a session's tokens.

    The inputs of `layers` are concatenated in this order (see formats.heads.HeadSpec); without layers it is the last
    hidden state after the final norm.
    """

    def __init__(self, hooks: LayerHooks, layers: Sequence[int]) -> None:
        """Raises Unsupported for layers that the model does not have."""
        check_tapped_layers(layers, len(hooks.layers))
        self.kept: Features[Any] = Features(mx.concatenate)
        self._hooks = hooks
        self._layers = tuple(layers)

    def run(self, model: Any, tokens: Any, entries: list[Any]) -> tuple[Any, Any]:
        """(logits [batch, n, V] of tokens [batch, n], features [batch, n, width]). Raises Unsupported without these."""
        states: list[Any] = [None] * (len(self._hooks.layers) + 2)
        with self._hooks.build(states=states):
            logits = model(tokens, cache=entries)
        found = [states[layer] for layer in self._layers] or [states[TRUNK]]
        if not all(isinstance(each, mx.array) and each.shape[:2] == tokens.shape for each in found):
            raise Unsupported(
                "the hidden states of this model cannot be read on MLX: its layers do not return a row for each token.",
                hint="Use --draft ngram, or a draft model.",
            )
        return logits, mx.concatenate(found, axis=-1)


class ModelRunner:
    """A model with the caches of one sequence. Scores are lazy arrays [rows, V].

    If there is a `tap`, `features` are those of the last forward, lazy as well: [rows, width].
    """

    def __init__(self, model: Any, quantization: KVQuantization | None = None) -> None:
        """Starts with empty caches, quantized by `quantization`. Raises BackendError for caches of unknown classes."""
        self.context = ForwardContext()
        self.caches = Caches(model, self.context, quantization)
        self.model = model
        self.tap: FeatureTap | None = None
        self.features: Any = None

    def run_chain(self, tokens: Sequence[int]) -> Any:
        return self.run(mx.array([list(tokens)], mx.int32))

    def run(self, tokens: Any) -> Any:
        """Run the tokens of an array [1, n] one after another."""
        if self.tap is None:
            return self.model(tokens, cache=self.caches.entries)[0]
        logits, features = self.tap.run(self.model, tokens, self.caches.entries)
        self.features = features[0]
        return logits[0]

    def run_tree(self, position: int, root: int, draft: Draft) -> Any:
        tokens = mx.array([[root, *draft.tokens.tolist()]], mx.int32)
        tree = TreeRows.from_draft(draft, position)
        with self.context.build(tree), tree_positions(tree.depth):
            return self.run(tokens)
