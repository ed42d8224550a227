"""Scores that stay on the device. Best tokens and draws come to the host with one wait, whole rows on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from edgespec.backends.mlx.draw import can_draw, draw
from edgespec.backends.mlx.library import map_errors, read
from edgespec.core.arrays import Ints, Logits
from edgespec.core.protocols import Draft
from edgespec.core.sampling import SamplingParams
from edgespec.core.truncate import non_finite_error


class DeviceDraft(Draft):
    """A chain of best tokens in an array [n] that the device may still compute.

    The scores of the target's forward on it bring the tokens along. Reading `tokens` before that waits for the device.
    """

    array: Any

    def __init__(self, array: Any) -> None:
        object.__setattr__(self, "array", array.astype(mx.int32))
        object.__setattr__(self, "parents", np.arange(-1, array.size - 1, dtype=np.int32))
        object.__setattr__(self, "q", None)
        object.__setattr__(self, "drafters", ())

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
            self.announced_token = int(values[0][0])  # -1, which is no token, if the host decides
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
