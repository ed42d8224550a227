"""The distance of a draft's distribution q from its target's p, of which only the most probable tokens are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from edgespec.train.parts import fill_up
from edgespec.train.teacher import Part

_LEAST_REST = 1e-6  # probability of all other tokens: sums of single precision and half-precision rows are less precise


def forward_kl(logits: mx.array, ids: mx.array, log_probs: mx.array, mask: mx.array) -> mx.array:
    """KL(p || q), by which the draft covers what the target may say: the mean over the mask, in single precision.

    Both are reduced to K + 1 events first: the target's K most probable tokens, and all others together. The loss is 0
    if these probabilities are equal.

    logits          [B, T, V] of the draft
    ids, log_probs  [B, T, K] the target's most probable tokens, and their log probabilities
    mask            [B, T]
    """
    logits = logits.astype(mx.float32)
    own = mx.take_along_axis(logits, ids, axis=-1) - mx.logsumexp(logits, axis=-1, keepdims=True)
    p, q = _add_rest(log_probs.astype(mx.float32)), _add_rest(own)
    distances = (mx.exp(p) * (p - q)).sum(-1)
    return (distances * mask).sum() / mx.maximum(mask.sum(), 1)


def _add_rest(log_probs: mx.array) -> mx.array:
    """[..., K + 1] with the log probability of all other tokens."""
    rest = mx.maximum(1 - mx.exp(log_probs).sum(-1, keepdims=True), _LEAST_REST)
    return mx.concatenate([log_probs, mx.log(rest)], axis=-1)


def distillation(network: Any, parts: Sequence[Part]) -> mx.array:
    """The objective of a sequential draft: its scores after each token are compared with the target's."""
    batch = fill_up(parts)
    logits = network(mx.array(batch.tokens))
    return forward_kl(logits, mx.array(batch.ids), mx.array(batch.log_probs), mx.array(batch.mask))
