"""A factor on a draft's logits that makes rejection sampling accept more of its tokens, found without training.

A token that is drawn from q is accepted with probability sum of min(p, q) over the vocabulary. Training by a divergence
leaves q less certain than that sum wants. The factor becomes part of the weights, so that every runtime applies it.
Greedy drafts do not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from edgespec.adapt.batches import cut_windows
from edgespec.adapt.evaluate import Matrix, find_rounds
from edgespec.adapt.teacher import RowStore, TeacherRows
from edgespec.adapt.texts import TrainingText
from edgespec.core.arrays import Logits
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import DraftRefused

Floats = npt.NDArray[np.float64]
SCALES: Floats = np.exp(np.linspace(np.log(0.5), np.log(2), 33))
"""Factors that are tried; 1 is among them."""
_WINDOW = 512  # tokens that are read at once
_ROWS = 64  # that are scaled at once
_ENOUGH = 4096  # rows that a factor is chosen by


def accept_by_scale(logits: Logits, rows: TeacherRows, scales: Sequence[float] | Floats) -> Floats:
    """[len(scales), n] how probably a token drawn from the draft is accepted at temperature 1.

    `logits` [n, V] are the draft's, `rows` the target's after the same n tokens. All tokens besides the K known ones
    count as one.
    """
    p = np.exp(rows.log_probs.astype(np.float64))
    found = np.zeros((len(scales), len(logits)))
    for start in range(0, len(logits), _ROWS):
        part = slice(start, start + _ROWS)
        z = logits[part] - logits[part].max(axis=1, keepdims=True)
        own = np.take_along_axis(z, rows.ids[part], axis=1)
        rest = 1 - p[part].sum(axis=1)
        for i, scale in enumerate(scales):
            q = np.exp(own * scale) / np.exp(z * scale).sum(axis=1, keepdims=True)
            found[i, part] = np.minimum(p[part], q).sum(axis=1) + np.clip(np.minimum(rest, 1 - q.sum(axis=1)), 0, 1)
    return found


def choose_scale(
    network: Any, texts: Sequence[TrainingText], rows: RowStore, depth: int, check: CheckCancelled
) -> float:
    """The factor with the most expected tokens in rounds of `depth` drawn tokens.

    `network` is MLX's, tokens int32 [B, T] to logits [B, T, V]; `rows` are those of `texts`, of which a few thousand
    tokens are read. Raises Cancelled, BackendError.
    """
    sums, n = np.zeros(len(SCALES)), 0
    for _, accepted in _read(network, texts, rows, SCALES, check):
        sums += [_chain(each, depth).cumprod(axis=1).sum() for each in accepted]
        n += accepted.shape[1]
        if n >= _ENOUGH:
            break
    return float(SCALES[int(np.argmax(sums))]) if n else 1.0


def apply_scale(network: Any, scale: float) -> None:
    """Make a factor on the logits a part of the last norm of a network. Raises DraftRefused where it has none."""
    norm = getattr(getattr(network, "model", None), "norm", None)
    if norm is None or "weight" not in norm:
        raise DraftRefused("the draft has no last norm to scale.", hint="Use a llama, qwen2 or qwen3.")
    norm.weight = norm.weight * scale


def measure_draws(
    network: Any, texts: Sequence[TrainingText], rows: RowStore, depth: int, check: CheckCancelled
) -> dict[str, Matrix]:
    """The Matrix of each conversation, of how probably drawn tokens are accepted at temperature 1.

    As choose_scale, of all texts. Where they were sampled at a lower temperature, a factor gains less in use than here.
    """
    found: dict[str, list[Matrix]] = {}
    for source, accepted in _read(network, texts, rows, (1.0,), check):
        found.setdefault(source, []).append(_chain(accepted[0], depth).astype(np.float32))
    return {source: np.concatenate(parts) for source, parts in found.items()}


def _read(
    network: Any,
    texts: Sequence[TrainingText],
    rows: RowStore,
    scales: Sequence[float] | Floats,
    check: CheckCancelled,
) -> Iterator[tuple[str, Floats]]:
    """(source, [len(scales), rounds] see accept_by_scale) of each part of a text, in rounds of find_rounds."""
    for window in cut_windows(texts, _WINDOW):
        check()
        text, read = texts[window.text], rows.read(window.text)
        first = max(window.first, find_rounds(text).start - 1)
        if first < window.stop:
            part = slice(first, window.stop)
            logits = network(mx.array(text.tokens[None, window.start : window.stop]))[0, first - window.start :]
            own = TeacherRows(read.ids[part], read.log_probs[part])
            yield text.source, accept_by_scale(np.array(logits.astype(mx.float32)), own, scales)


def _chain(accepted: Floats, depth: int) -> Floats:
    """[n, depth] of each depth of drafts that begin at each of n rounds; behind the last one nothing is accepted."""
    padded = np.concatenate([accepted, np.zeros(depth - 1)])
    return np.lib.stride_tricks.sliding_window_view(padded, depth)
