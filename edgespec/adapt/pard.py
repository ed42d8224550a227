"""Training draft models that predict several tokens in one forward (PARD, An et al. 2025, arXiv:2504.18583).

A window of a text has its own rows, and mask rows: those of a cut follow a token of the text, see the text up to it and
each other, and predict the tokens behind the one after it. Most of the deeper rows are left out (conditional drop).
All rows lie in one sequence, with positions and an attention mask of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache, make_prompt_cache

from edgespec.adapt.evaluate import Matrix, find_rounds
from edgespec.adapt.options import LossName
from edgespec.adapt.teacher import Part, Parts, cut_windows, fill_up
from edgespec.adapt.texts import TrainingText
from edgespec.adapt.trainer import LOSSES, Objective
from edgespec.backends.mlx.caches import ForwardContext, KeyValues, tree_positions
from edgespec.core.protocols import CheckCancelled
from edgespec.core.sampling import Ints
from edgespec.errors import DraftRefused

DEPTH = 8  # tokens that are drafted in one forward
DECAY = 0.8  # of the weight of each further one
KEPT, LEAST = 0.7, 0.2  # of the cuts, at each further depth; and at every depth

_WINDOW = 256  # tokens that are measured at once


@dataclass(frozen=True, slots=True)
class PardBatch:
    """n rows of each of B windows with the same cuts: those of the text, then mask rows; and the target's rows there.

    tokens          [B, n] int32
    positions       [n] int32 in the text; a row predicts the token after its position
    sees            [n, n] which rows a row attends to
    ids, log_probs  [B, n, K]; see Part
    weights         [B, n] float32; 0 for rows that do not count
    """

    tokens: Ints
    positions: Ints
    sees: npt.NDArray[np.bool_]
    ids: Ints
    log_probs: npt.NDArray[np.floating]
    weights: npt.NDArray[np.float32]


class PardBatches:
    """Batches[PardBatch] of the windows of texts. Each has cuts of its own, other ones in each epoch."""

    def __init__(self, parts: Parts, mask_token: int, *, depth: int = DEPTH, seed: int = 0) -> None:
        """`depth` tokens are drafted in one forward."""
        self._parts = parts
        self._mask_token = mask_token
        self._depth, self._seed = depth, seed

    def __len__(self) -> int:
        return len(self._parts)

    def take(self, step: int) -> PardBatch:
        batch = fill_up(self._parts.take(step))
        counts = batch.mask.any(axis=0)
        stop = int(np.flatnonzero(counts)[-1]) + 1
        cuts, depths = choose_cuts(int(counts.argmax()), stop, self._depth, np.random.default_rng([self._seed, step]))
        return pack_batch(batch, cuts, depths, self._mask_token, DECAY)


def choose_cuts(first: int, size: int, depth: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """(the cuts [m], the depths [m] from 1 on) of the mask rows in a window of `size` tokens.

    A cut is the position of the last token that its rows see. Rows before `first` predict nothing that is trained. A
    cut with a row at one depth has rows at all smaller ones.
    """
    cuts, depths = [], []
    kept = first + rng.permutation(size - first)
    for d in range(1, depth):
        kept = kept[kept + d < size][: max(1, round((size - first) * max(KEPT**d, LEAST)))]
        cuts.append(kept)
        depths.append(np.full(len(kept), d))
    return np.concatenate(cuts).astype(np.int32), np.concatenate(depths).astype(np.int32)


def pack(tokens: Ints, cuts: Ints, depths: Ints, mask_token: int) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    """(tokens, positions, sees) of the rows of windows [B, size] with mask rows behind `cuts`; see PardBatch and
    `choose_cuts`.
    """
    n_windows, size = tokens.shape
    own = np.arange(size)
    cut, depth = np.concatenate([own, cuts]), np.concatenate([np.zeros_like(own), depths])
    sees_text = (depth == 0) & (cut <= cut[:, None])
    sees_masks = (depth > 0) & (cut == cut[:, None]) & (depth <= depth[:, None])
    masks = np.full((n_windows, len(cuts)), mask_token, np.int32)
    packed = np.concatenate([tokens.astype(np.int32), masks], axis=1)
    return packed, (cut + depth).astype(np.int32), sees_text | sees_masks


def pack_batch(batch: Part, cuts: Ints, depths: Ints, mask_token: int, decay: float) -> PardBatch:
    """The windows of a batch with mask rows behind `cuts`, of a weight of `decay` ** depth.

    A mask row counts where those of its cut and of its own position do.
    """
    tokens, at, sees = pack(batch.tokens, cuts, depths, mask_token)
    size = batch.tokens.shape[1]
    own = np.concatenate([np.arange(size), cuts])
    weights = np.concatenate([np.ones(size), decay**depths]) * batch.mask[:, at] * batch.mask[:, own]
    return PardBatch(tokens, at, sees, batch.ids[:, at], batch.log_probs[:, at], weights.astype(np.float32))


class PackedKeys(KeyValues):
    """The keys and values of one layer in one forward of packed rows."""

    def __init__(self, sees: Any) -> None:
        super().__init__(ForwardContext())
        self._sees = sees

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        return keys, values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return self._sees


def run_packed(network: Any, tokens: Ints, positions: Ints, sees: npt.NDArray[np.bool_]) -> Any:
    """Logits [batch, n, V] of rows [batch, n] at `positions` [n], which attend to what `sees` [n, n] says."""
    mask = mx.array(sees)
    with tree_positions(mx.array(positions)):
        return network(mx.array(tokens), cache=[PackedKeys(mask) for _ in network.layers])


def check_packing(network: Any) -> None:
    """Raises DraftRefused for layers that would not see what packed rows are to see: recurrent ones, short windows."""
    if any(type(cache) is not KVCache for cache in make_prompt_cache(network)):
        raise DraftRefused(
            "the draft cannot be trained as a PARD model: its layers do not attend to all tokens before theirs.",
            hint="Use a llama, qwen2 or qwen3.",
        )


def parallel(name: LossName) -> Objective[PardBatch]:
    """The objective of a PARD model: each row is compared with the target's at its position."""
    loss = LOSSES[name]

    def objective(network: Any, batch: PardBatch) -> mx.array:
        logits = run_packed(network, batch.tokens, batch.positions, batch.sees)
        return loss(logits, mx.array(batch.ids), mx.array(batch.log_probs), mx.array(batch.weights))

    return objective


def measure_packed(
    network: Any, texts: Sequence[TrainingText], mask_token: int, depth: int, check: CheckCancelled
) -> dict[str, Matrix]:
    """The Matrix of each conversation, for blocks of `depth` tokens.

    All blocks of a part of a text lie in one forward. Raises Cancelled.
    """
    found: dict[str, list[Matrix]] = {}
    for window in cut_windows(texts, _WINDOW):
        check()
        text, size = texts[window.text], window.stop - window.start
        cuts = np.arange(max(window.first, find_rounds(text).start - 1), window.stop) - window.start
        if not len(cuts):
            continue
        own = np.tile(cuts, depth - 1).astype(np.int32), np.repeat(np.arange(1, depth, dtype=np.int32), len(cuts))
        logits = run_packed(network, *pack(text.tokens[None, window.start : window.stop], *own, mask_token))
        best = np.array(mx.argmax(logits[0], axis=-1))
        best = np.concatenate([best[cuts], best[size:]]).reshape(depth, len(cuts)).T
        at = window.start + cuts[:, None] + 1 + np.arange(depth)  # the token of each depth
        hits = (at <= window.stop) & (best == text.tokens[np.minimum(at, window.stop)])
        found.setdefault(text.source, []).append(hits.astype(np.float32))
    return {source: np.concatenate(parts) for source, parts in found.items()}
