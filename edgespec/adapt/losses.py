"""Distances of a draft's distribution q from its target's p, of which only the most probable tokens are known.

Both are reduced to K + 1 events first: the target's K most probable tokens, and all others together. A loss is 0 where
these probabilities are equal. Shapes: B texts, T tokens, V scores in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from edgespec.adapt.batches import Batch
from edgespec.adapt.options import LossName

Loss = Callable[[mx.array, mx.array, mx.array, mx.array], mx.array]
"""(logits [B, T, V], ids [B, T, K], log_probs [B, T, K], mask [B, T]) -> the mean over the mask, in single precision.

`logits` are the draft's, `ids` and `log_probs` the target's most probable tokens and their log probabilities.
"""

_LEAST_REST = 1e-6  # probability of all other tokens: sums of single precision and half-precision rows are less precise


def forward_kl(logits: mx.array, ids: mx.array, log_probs: mx.array, mask: mx.array) -> mx.array:
    """KL(p || q): the draft covers what the target may say."""
    p, q = _events(logits, ids, log_probs)
    return _mean(_kl(p, q), mask)


def reverse_kl(logits: mx.array, ids: mx.array, log_probs: mx.array, mask: mx.array) -> mx.array:
    """KL(q || p): the draft says only what the target may say."""
    p, q = _events(logits, ids, log_probs)
    return _mean(_kl(q, p), mask)


def jsd(logits: mx.array, ids: mx.array, log_probs: mx.array, mask: mx.array) -> mx.array:
    """Jensen-Shannon divergence: the mean of both distances from the mixture (p + q) / 2."""
    p, q = _events(logits, ids, log_probs)
    mixture = mx.logaddexp(p, q) - mx.log(mx.array(2.0))
    return _mean((_kl(p, mixture) + _kl(q, mixture)) / 2, mask)


def tv(logits: mx.array, ids: mx.array, log_probs: mx.array, mask: mx.array) -> mx.array:
    """Total variation: 1 minus the probability that rejection sampling accepts a token drawn from q."""
    p, q = _events(logits, ids, log_probs)
    return _mean(mx.abs(mx.exp(p) - mx.exp(q)).sum(-1) / 2, mask)


LOSSES: dict[LossName, Loss] = {"forward-kl": forward_kl, "reverse-kl": reverse_kl, "jsd": jsd, "tv": tv}


def distillation(name: LossName) -> Callable[[Any, Batch], mx.array]:
    """The objective of a sequential draft: its scores after each token are compared with the target's."""
    loss = LOSSES[name]

    def objective(network: Any, batch: Batch) -> mx.array:
        logits = network(mx.array(batch.tokens))
        return loss(logits, mx.array(batch.ids), mx.array(batch.log_probs), mx.array(batch.mask))

    return objective


def _events(logits: mx.array, ids: mx.array, log_probs: mx.array) -> tuple[mx.array, mx.array]:
    """(log p, log q), each [B, T, K + 1]."""
    logits = logits.astype(mx.float32)
    own = mx.take_along_axis(logits, ids, axis=-1) - mx.logsumexp(logits, axis=-1, keepdims=True)
    return _add_rest(log_probs.astype(mx.float32)), _add_rest(own)


def _add_rest(log_probs: mx.array) -> mx.array:
    """[..., K + 1] with the log probability of all other tokens."""
    rest = mx.maximum(1 - mx.exp(log_probs).sum(-1, keepdims=True), _LEAST_REST)
    return mx.concatenate([log_probs, mx.log(rest)], axis=-1)


def _kl(p: mx.array, q: mx.array) -> mx.array:
    """[B, T] of log probabilities."""
    return (mx.exp(p) * (p - q)).sum(-1)


def _mean(losses: mx.array, mask: mx.array) -> mx.array:
    return (losses * mask).sum() / mx.maximum(mask.sum(), 1)
