"""Hidden states of a session's forwards, for trained heads that draft from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.features import Features
from edgespec.backends.mlx.hooks import LayerHooks


class FeatureTap:
    """Reads the hidden states of some layers in forwards of one model; `kept` are those of a session's tokens.

    The inputs of `layers` are concatenated in this order (see formats.heads.HeadSpec); without layers it is the last
    hidden state after the final norm.
    """

    def __init__(self, hooks: LayerHooks, layers: Sequence[int]) -> None:
        """Raises Unsupported for layers that the model does not have."""
        count = len(hooks.layers)
        if any(not 0 <= layer <= count for layer in layers):
            raise Unsupported(
                f"the head reads layers {', '.join(map(str, layers))}, and the model has {count}.",
                hint="The head is for another model. Use --draft ngram, or another head.",
            )
        self.kept: Features[Any] = Features(mx.concatenate)
        self._hooks = hooks
        self._layers = tuple(layers)

    def run(self, model: Any, tokens: Any, entries: list[Any]) -> tuple[Any, Any]:
        """Logits [batch, n, V] of tokens [batch, n], and their features [batch, n, width].

        Raises Unsupported where the model's hidden states are not what a head reads.
        """
        with self._hooks.read_states() as states:
            logits = model(tokens, cache=entries)
        found = [states.inputs[layer] for layer in self._layers] or [states.final]
        if not all(isinstance(each, mx.array) and each.shape[:2] == tokens.shape for each in found):
            raise Unsupported(
                "the hidden states of this model cannot be read on MLX: its layers do not return a row for each token.",
                hint="Use --draft ngram, or a draft model.",
            )
        return logits, mx.concatenate(found, axis=-1)
