"""Scores that stay on the device: best tokens and draws come to the host with one wait, whole rows only when asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.backends.mlx.draw import can_draw, draw
from edgespec.backends.mlx.library import computing
from edgespec.core.arrays import Ints, Logits
from edgespec.core.sampling import SamplingParams, non_finite_error

TokenKnown = Callable[["MlxScores", Any], None]
"""Told the array [1] of the emitted token before the host has read it."""


class MlxScores:
    """Logits [rows, V] of a forward that may still be running."""

    def __init__(self, logits: Any, token_known: TokenKnown | None = None) -> None:
        """`token_known` is called once, by the first read that decides on a single row's token."""
        self._logits = logits
        self._token_known = token_known
        self._rows: Logits | None = None
        self.waited_s = self.peer_wait_s = 0.0
        self.peer_rows = 0
        self.first: int | None = None  # the token that `token_known` was told, once the host has read it

    def argmax(self) -> Ints:
        best = mx.argmax(self._logits, axis=-1).astype(mx.int32)
        top = self._logits.max(axis=-1)
        announced = self._announce(best, top)
        self._wait(best, top)
        if not np.isfinite(np.array(top.astype(mx.float32))).all():
            raise non_finite_error()
        return self._read(best, announced)

    def draw(self, params: SamplingParams, uniforms: Sequence[float]) -> Ints | None:
        if not can_draw(params):
            return None
        at = mx.array(np.asarray(uniforms, np.float32))
        tokens, sure = draw(self._logits.astype(mx.float32), params, at)
        tokens = mx.where(sure, tokens, -1)
        announced = self._announce(tokens)
        self._wait(tokens)
        return self._read(tokens, announced)

    def logits(self, row: int) -> Logits:
        if self._rows is None:
            rows = self._logits.astype(mx.float32)
            self._wait(rows)
            self._rows = np.array(rows)
        z: Logits = self._rows[row]
        return z

    def hidden(self) -> object:
        return None

    def _announce(self, tokens: Any, *more: Any) -> bool:
        """Hand the device what the host is about to read, before anything that it need not wait for; only once."""
        known, self._token_known = self._token_known, None
        if known is None:
            return False
        with computing():
            mx.async_eval(tokens, *more)
        known(self, mx.maximum(tokens, 0))
        return True

    def _read(self, tokens: Any, announced: bool) -> Ints:
        found: Ints = np.array(tokens)
        if announced:
            self.first = int(found[0])  # -1 where the host decides, which is no token
        return found

    def _wait(self, *arrays: Any) -> None:
        started = perf_counter()
        with computing():
            mx.eval(*arrays)
        self.waited_s += perf_counter() - started
