"""Scores that stay on the device. Best tokens and draws come to the host with one wait, whole rows on demand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from edgespec.backends.mlx.library import map_errors, read
from edgespec.core.protocols import Draft
from edgespec.core.sampling import Ints, Logits, SamplingParams, non_finite_error

# Draws from the distribution of every row on the device, by the rules of core.sampling and core.sampling.index_at.
#
# The device computes in single precision. It decides a row only where no rounding can change the token; the host
# computes the other rows from the logits. So equal logits and equal seeds give equal tokens on every runtime.


_BLOCK = 1024
_MARGIN = 2e-5  # of the total mass; float32 sums over 1,024 weights here and 512 on the host are off by less
_MAX_TOP_K = 1024  # the host applies a larger top-k


def can_draw(params: SamplingParams) -> bool:
    """Whether `draw` can apply these parameters.

    Not typical sampling, penalties or bias; and top-p only with top-k, since sorting a whole vocabulary costs more than
    it saves.
    """
    if params.temperature < 1e-3 or params.typical_p < 1 or params.has_penalties or params.logit_bias:
        return False
    return params.top_k <= _MAX_TOP_K and (params.top_k > 0 or params.top_p >= 1)


def draw(logits: Any, params: SamplingParams, uniforms: Any) -> tuple[Any, Any]:
    """Tokens [rows] int32 and whether each is certain [rows], for logits [rows, V] float32 and uniforms [rows]."""
    best = logits.max(axis=-1, keepdims=True)
    kept, is_certain = _truncate(logits, best, params)
    weights = mx.exp((logits - best) / np.float32(params.temperature))
    if kept is not None:
        weights = mx.where(kept, weights, 0)
    rows, size = weights.shape
    n_blocks = -(-size // _BLOCK)
    blocks = mx.pad(weights, [(0, 0), (0, n_blocks * _BLOCK - size)]).reshape(rows, n_blocks, _BLOCK)
    ends = mx.cumsum(blocks.sum(axis=-1), axis=-1)  # [rows, n_blocks]
    total = ends[:, -1:]
    level = uniforms[:, None] * total
    block = mx.minimum((ends <= level).sum(axis=-1, keepdims=True), n_blocks - 1)  # [rows, 1]
    before = mx.where(block > 0, mx.take_along_axis(ends, mx.maximum(block - 1, 0), axis=-1), 0)
    inside = before + mx.cumsum(mx.take_along_axis(blocks, block[..., None], axis=1)[:, 0], axis=-1)
    at = mx.minimum((inside <= level).sum(axis=-1, keepdims=True), _BLOCK - 1)
    upper = mx.take_along_axis(inside, at, axis=-1)
    lower = mx.where(at > 0, mx.take_along_axis(inside, mx.maximum(at - 1, 0), axis=-1), before)
    margin = _MARGIN * total
    is_clear = (upper - level > margin) & (level - lower > margin)
    return (block * _BLOCK + at)[:, 0].astype(mx.int32), is_certain & is_clear[:, 0] & mx.isfinite(total[:, 0])


def _truncate(logits: Any, best: Any, params: SamplingParams) -> tuple[Any, Any]:
    """[rows, V] which tokens the truncations leave (None: all), and [rows] where rounding cannot change that."""
    kept: Any = None
    is_certain = mx.ones(logits.shape[:1], mx.bool_)
    k = min(params.top_k, logits.shape[-1])
    if k:
        top = -mx.sort(-mx.topk(logits, k, axis=-1), axis=-1)  # [rows, k], best first
        kept = logits >= top[:, -1:]
        is_certain = kept.sum(axis=-1) == k  # no ties at the border
        if params.top_p < 1:
            border, is_clear = _nucleus(top, params.top_p)
            kept = kept & (logits >= border)
            is_certain = is_certain & is_clear
    if params.min_p > 0:
        enough = logits >= best + np.float32(math.log(params.min_p))
        kept = enough if kept is None else kept & enough
    return kept, is_certain


def _nucleus(top: Any, top_p: float) -> tuple[Any, Any]:
    """The smallest logit [rows, 1] in the nucleus of `top` [rows, k], and [rows] where rounding cannot change it."""
    weights = mx.exp(top - top[:, :1])
    sums = mx.cumsum(weights, axis=-1)
    mass, margin = top_p * sums[:, -1:], _MARGIN * sums[:, -1:]
    last = mx.minimum((sums < mass).sum(axis=-1, keepdims=True), top.shape[-1] - 1)
    border, least = (mx.take_along_axis(x, last, axis=-1) for x in (top, weights))
    # The host sorts by weight, then by id, and may order weights that differ by a rounding error in another way.
    alone = (mx.abs(weights - least) <= 1e-6 * least).sum(axis=-1) == 1
    is_clear = (mx.abs(sums - mass) > margin).all(axis=-1) & alone
    return border, is_clear


# Drafts that stay on the device, where the target can score them before the host has read them.


class DeviceDraft(Draft):
    """A chain of best tokens in an array [n] that the device may still compute.

    The scores of the target's forward on it bring the tokens along. Reading `tokens` before that waits for the device.
    """

    array: Any

    def __init__(self, array: Any) -> None:
        object.__setattr__(self, "array", array.astype(mx.int32))
        object.__setattr__(self, "parents", np.arange(-1, array.size - 1, dtype=np.int32))
        object.__setattr__(self, "q", None)
        object.__setattr__(self, "sources", ())

    @cached_property
    def tokens(self) -> Ints:
        return read(self.array)[0]

    def receive(self, tokens: Ints) -> None:
        """The host has read the array together with something else."""
        self.__dict__.setdefault("tokens", tokens)

    def __len__(self) -> int:
        return len(self.parents)


def chain_rows(known_tokens: Sequence[int], draft: Draft) -> Any:
    """[1, n] the tokens of a chain's forward. Does not wait for those that are on the device."""
    drafted = draft.array if isinstance(draft, DeviceDraft) else mx.array(draft.tokens)
    return mx.concatenate([mx.array(list(known_tokens), mx.int32), drafted])[None]


OnToken = Callable[["MlxScores", Any], None]
"""Called with the array [1] of the emitted token before the host has read it."""


class MlxScores:
    """Logits [rows, V] of a forward that may still be running."""

    def __init__(self, logits: Any, on_token: OnToken | None = None, draft: Draft | None = None) -> None:
        """`on_token` is called by the first read of a single row's token; what a `draft` on the device says is
        read with that token.
        """
        self.array = logits
        self._on_token = on_token
        self._draft = draft if isinstance(draft, DeviceDraft) else None
        self._rows: Logits | None = None
        self.waited_s = self.peer_wait_s = 0.0
        self.peer_rows = 0
        self.announced_token: int | None = None  # the token of the call of `on_token`, once the host has read it

    def argmax(self) -> Ints:
        best = mx.argmax(self.array, axis=-1).astype(mx.int32)
        top = self.array.max(axis=-1).astype(mx.float32)
        tokens, highest = self._decide(best, top)
        if not np.isfinite(highest).all():
            raise non_finite_error()
        return tokens

    def draw(self, params: SamplingParams, uniforms: Sequence[float]) -> Ints | None:
        if not can_draw(params):
            return None
        levels = mx.array(np.asarray(uniforms, np.float32))
        drawn, is_certain = draw(self.array.astype(mx.float32), params, levels)
        return self._decide(mx.where(is_certain, drawn, -1))[0]

    def logits(self, row: int) -> Logits:
        if self._rows is None:
            (self._rows,) = self._read(self.array.astype(mx.float32))
        z: Logits = self._rows[row]
        return z

    def host_logits(self, row: int) -> Logits | None:
        return None if self._rows is None else self._rows[row]

    def _decide(self, tokens: Any, *more: Any) -> list[npt.NDArray[Any]]:
        """`tokens` and `more` in host memory; before the wait for them, `on_token` is called."""
        on_token, self._on_token = self._on_token, None
        if on_token is not None:
            with map_errors():
                mx.async_eval(tokens, *more)
            on_token(self, mx.maximum(tokens, 0))
        values = self._read(tokens, *more)
        if on_token is not None:
            self.announced_token = int(values[0][0])  # -1 where the host decides, which is no token
        return values

    def _read(self, *arrays: Any) -> list[npt.NDArray[Any]]:
        """The arrays in host memory, and the draft's tokens with them."""
        started = perf_counter()
        draft, self._draft = self._draft, None
        if draft is None:
            values = read(*arrays)
        else:
            *values, tokens = read(*arrays, draft.array)
            draft.receive(tokens)
        self.waited_s += perf_counter() - started
        return values


def find_best(logits: Any) -> Any:
    """The best token [1] of logits [1, V], on the device."""
    return mx.argmax(logits, axis=-1)


def greedy_chain(
    first: Any, run: Callable[[Any], Any], n: int, vocab_size: int, choose: Callable[[Any], Any] = find_best
) -> tuple[DeviceDraft, MlxScores]:
    """A chain of `n` best ids below `vocab_size`, and the scores that they were chosen from; nothing waits for them.

    `first` [1, V] are those of the first token; `run` gives those [1, V] after a token [1].
    """
    rows, best = [first], [choose(first[:, :vocab_size])]
    while len(best) < n:
        rows.append(run(best[-1]))
        best.append(choose(rows[-1][:, :vocab_size]))
    chain = DeviceDraft(mx.concatenate(best))
    return chain, MlxScores(mx.concatenate(rows), draft=chain)
