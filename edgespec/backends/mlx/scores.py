"""Scores that stay on the device. Best tokens and draws come to the host with one wait, whole rows on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.backends.mlx.draw import can_draw, draw
from edgespec.backends.mlx.library import map_errors
from edgespec.core.arrays import Ints, Logits
from edgespec.core.sampling import SamplingParams, non_finite_error

OnToken = Callable[["MlxScores", Any], None]
"""Called with the array [1] of the emitted token before the host has read it."""


class MlxScores:
    """Logits [rows, V] of a forward that may still be running."""

    def __init__(self, logits: Any, on_token: OnToken | None = None) -> None:
        """`on_token` is called once, by the first read that decides on the token of a single row."""
        self._logits = logits
        self._on_token = on_token
        self._rows: Logits | None = None
        self.waited_s = self.peer_wait_s = 0.0
        self.peer_rows = 0
        self.announced_token: int | None = None  # the token of the call of `on_token`, once the host has read it

    def argmax(self) -> Ints:
        best = mx.argmax(self._logits, axis=-1).astype(mx.int32)
        top = self._logits.max(axis=-1)
        is_announced = self._announce(best, top)
        self._wait(best, top)
        if not np.isfinite(np.array(top.astype(mx.float32))).all():
            raise non_finite_error()
        return self._read(best, is_announced)

    def draw(self, params: SamplingParams, uniforms: Sequence[float]) -> Ints | None:
        if not can_draw(params):
            return None
        levels = mx.array(np.asarray(uniforms, np.float32))
        tokens, is_certain = draw(self._logits.astype(mx.float32), params, levels)
        tokens = mx.where(is_certain, tokens, -1)
        is_announced = self._announce(tokens)
        self._wait(tokens)
        return self._read(tokens, is_announced)

    def logits(self, row: int) -> Logits:
        if self._rows is None:
            rows = self._logits.astype(mx.float32)
            self._wait(rows)
            self._rows = np.array(rows)
        z: Logits = self._rows[row]
        return z

    def _announce(self, tokens: Any, *more: Any) -> bool:
        """Start on `tokens` and `more`, then call `on_token`; returns whether there was one to call."""
        on_token, self._on_token = self._on_token, None
        if on_token is None:
            return False
        with map_errors():
            mx.async_eval(tokens, *more)
        on_token(self, mx.maximum(tokens, 0))
        return True

    def _read(self, tokens: Any, is_announced: bool) -> Ints:
        values: Ints = np.array(tokens)
        if is_announced:
            self.announced_token = int(values[0])  # -1 where the host decides, which is no token
        return values

    def _wait(self, *arrays: Any) -> None:
        started = perf_counter()
        with map_errors():
            mx.eval(*arrays)
        self.waited_s += perf_counter() - started
