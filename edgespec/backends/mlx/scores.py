"""Scores that stay on the device. Best tokens and draws come to the host with one wait, whole rows on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from edgespec.backends.mlx.draw import can_draw, draw
from edgespec.backends.mlx.lazy_draft import DeviceDraft
from edgespec.backends.mlx.library import map_errors, read
from edgespec.core.arrays import Ints, Logits
from edgespec.core.protocols import Draft
from edgespec.core.sampling import SamplingParams
from edgespec.core.truncation import non_finite_error

OnToken = Callable[["MlxScores", Any], None]
"""Called with the array [1] of the emitted token before the host has read it."""


class MlxScores:
    """Logits [rows, V] of a forward that may still be running."""

    def __init__(self, logits: Any, on_token: OnToken | None = None, draft: Draft | None = None) -> None:
        """`on_token` is called once, by the first read that decides on the token of a single row. A `draft` that is on
        the device comes to the host with the first read.
        """
        self._logits = logits
        self._on_token = on_token
        self._draft = draft if isinstance(draft, DeviceDraft) else None
        self._rows: Logits | None = None
        self.waited_s = self.peer_wait_s = 0.0
        self.peer_rows = 0
        self.announced_token: int | None = None  # the token of the call of `on_token`, once the host has read it

    def argmax(self) -> Ints:
        best = mx.argmax(self._logits, axis=-1).astype(mx.int32)
        top = self._logits.max(axis=-1).astype(mx.float32)
        is_announced = self._announce(best, top)
        tokens, highest = self._read(best, top)
        if not np.isfinite(highest).all():
            raise non_finite_error()
        return self._note_announced(tokens, is_announced)

    def draw(self, params: SamplingParams, uniforms: Sequence[float]) -> Ints | None:
        if not can_draw(params):
            return None
        levels = mx.array(np.asarray(uniforms, np.float32))
        drawn, is_certain = draw(self._logits.astype(mx.float32), params, levels)
        drawn = mx.where(is_certain, drawn, -1)
        is_announced = self._announce(drawn)
        (tokens,) = self._read(drawn)
        return self._note_announced(tokens, is_announced)

    def logits(self, row: int) -> Logits:
        if self._rows is None:
            (self._rows,) = self._read(self._logits.astype(mx.float32))
        z: Logits = self._rows[row]
        return z

    def host_logits(self, row: int) -> Logits | None:
        return None if self._rows is None else self._rows[row]

    def _announce(self, tokens: Any, *more: Any) -> bool:
        """Start on `tokens` and `more`, then call `on_token`; returns whether there was one to call."""
        on_token, self._on_token = self._on_token, None
        if on_token is None:
            return False
        with map_errors():
            mx.async_eval(tokens, *more)
        on_token(self, mx.maximum(tokens, 0))
        return True

    def _note_announced(self, tokens: Ints, is_announced: bool) -> Ints:
        if is_announced:
            self.announced_token = int(tokens[0])  # -1 where the host decides, which is no token
        return tokens

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
