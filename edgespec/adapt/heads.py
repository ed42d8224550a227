"""Training of heads that read their own hidden states from the second drafted token on: MTP and EAGLE.

Released heads were mostly trained for one token, and are then fed what they have said themselves. Here several passes
over a text train this: the first reads the target's hidden states, each further one the head's own of the row before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.adapt.evaluate import Matrix, find_rounds
from edgespec.adapt.head_student import HeadNetwork
from edgespec.adapt.head_texts import HeadText, HeadTexts
from edgespec.adapt.losses import LOSSES
from edgespec.adapt.options import LossName
from edgespec.adapt.trainer import Objective
from edgespec.backends.mlx.forward_context import ForwardContext
from edgespec.backends.mlx.keyvalues import KeyValues
from edgespec.backends.mlx.pair_session import PairNetwork
from edgespec.core.protocols import CheckCancelled

DEPTH = 4  # passes
DECAY = 0.8  # of the weight of each further pass
_LEAST = -1e4  # for a score that is -inf


class PassKeys(KeyValues):
    """Keys and values of one layer in several passes over the same pairs.

    Row p of pass d came from row p - 1 of the pass before: it sees the pairs of the first pass up to p - d, which the
    target has accepted, and the one row of each later pass that it descends from.
    """

    def __init__(self) -> None:
        super().__init__(ForwardContext())
        self._passes: list[tuple[Any, Any]] = []

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        self._passes.append((keys, values))
        both = zip(*self._passes, strict=True)
        keys, values = (mx.concatenate(each, axis=2) for each in both)
        return keys, values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        depth, row, column = len(self._passes), mx.arange(N)[:, None], mx.arange(N)[None]
        first = column <= row - depth
        return mx.concatenate([first, *(column == row - depth + i for i in range(1, depth + 1))], axis=1)


def run_passes(network: PairNetwork, tokens: Any, features: Any, depth: int) -> list[Any]:
    """Scores [n - 1, V] of each of `depth` passes, for tokens [n] and features [n, width].

    Row p of pass d predicts token p + 2 as the head does after d tokens of its own, all of which are in the text. The
    first d rows of pass d are not those of any draft.
    """
    states, keys, scores = network.fuse(features[:-1]), [PassKeys() for _ in range(network.depth)], []
    for _ in range(depth):
        output = network.run(tokens[1:], states, keys)
        scores.append(network.score(output))
        states = network.feed_back(output)
        states = mx.concatenate([mx.zeros_like(states[:1]), states[:-1]])
    return scores


def recursion(name: LossName, depth: int = DEPTH, decay: float = DECAY) -> Objective[Sequence[HeadText]]:
    """The objective of a head: the scores of each pass are compared with the target's."""
    loss, total_weight = LOSSES[name], sum(decay**d for d in range(depth))

    def objective(network: HeadNetwork, batch: Sequence[HeadText]) -> mx.array:
        head, total = network.build(), mx.array(0.0)
        for text in batch:
            passes = run_passes(head, mx.array(text.tokens), text.features, depth)
            ids, log_probs = mx.array(text.rows.ids[1:]), mx.array(text.rows.log_probs[1:])
            for d, scores in enumerate(passes):
                scores, log_probs = _leave_out_unknown(scores, ids, log_probs)
                mask = mx.array(text.mask[1:] * (np.arange(len(text.mask) - 1) >= d))
                total = total + decay**d * loss(scores[None], ids[None], log_probs[None], mask[None])
        return total / (len(batch) * total_weight)

    return objective


def _leave_out_unknown(scores: Any, ids: Any, log_probs: Any) -> tuple[Any, Any]:
    """(scores, log_probs) for tokens that the head does not know: it should say what the target says of the others."""
    unknown = mx.isinf(mx.take_along_axis(scores, ids, axis=-1))
    known = 1 - (mx.exp(log_probs) * unknown).sum(-1, keepdims=True)
    log_probs = mx.where(unknown, _LEAST, log_probs - mx.log(mx.maximum(known, 1e-3)))
    return mx.maximum(scores, _LEAST), log_probs


def measure_heads(network: HeadNetwork, texts: HeadTexts, depth: int, check: CheckCancelled) -> dict[str, Matrix]:
    """The Matrix of each conversation, for drafts of `depth` tokens.

    An entry says whether the head's best token is the text's after so many tokens of its own that were: passes over a
    text give what drafts at all its positions would. Raises Cancelled, BackendError.
    """
    head, found = network.build(), dict[str, list[Matrix]]()
    for index, window in enumerate(texts.windows):
        check()
        text, part = texts.texts[window.text], texts.read(index)
        passes = run_passes(head, mx.array(part.tokens), part.features, depth)
        best = np.array(mx.argmax(mx.stack(passes), axis=-1))  # [depth, n - 1]
        rounds = np.arange(max(window.first + 1, find_rounds(text).start), window.stop + 1)[:, None]
        at = rounds + np.arange(depth)  # the token of each depth
        rows = at - 2 - window.start  # of the pass that predicts it
        is_known = (rounds >= window.start + 2) & (at <= window.stop)
        at, rows = np.minimum(at, window.stop), np.clip(rows, 0, best.shape[1] - 1)
        hits = is_known & (best[np.arange(depth), rows] == text.tokens[at])
        found.setdefault(text.source, []).append(hits.astype(np.float32))
    return {source: np.concatenate(parts) for source, parts in found.items()}
