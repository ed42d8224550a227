"""Keys and values of one attention layer, in a linear buffer that can be cut back, whatever the layer's window.

Stands in for mlx-lm's KVCache, QuantizedKVCache and RotatingKVCache. The last keeps its window in a ring, which forgets
what a rejected draft has overwritten.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.base import create_causal_mask

from edgespec.backends.mlx.layout import Layout

SLACK = 128  # rows kept behind a window: how far it can be cut back
_STEP = 256  # rows by which a buffer grows


@dataclass(frozen=True, slots=True)
class Packing:
    """A quantized cache: `bits` an element, with a scale and a bias for every `group` of them."""

    bits: int
    group: int


class KeyValues:
    """Buffers [1, heads, rows, width] of the last tokens before `length`; with a `window`, older ones are dropped.

    The attributes and methods that models use are those of mlx-lm's caches.
    """

    def __init__(self, layout: Layout, window: int | None = None, packing: Packing | None = None) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.length = 0
        self._layout = layout
        self._window = window
        self._start = 0  # position of the first row
        self._fetched = 0  # rows that the last update returned
        if packing is not None:  # attention looks for these two attributes
            self.bits = packing.bits
            self.group_size = packing.group

    @property
    def offset(self) -> Any:
        """Position of the next row; in a forward with a batch row for each draft node, of each of them [n]."""
        tree = self._layout.tree
        return tree.position + tree.depth if tree is not None and tree.by_nodes else self.length

    @property
    def has_window(self) -> bool:
        return self._window is not None

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        self._layout.reached(keys, values)
        tree = self._layout.tree
        if tree is not None and tree.by_nodes:
            keys, values = keys.transpose(2, 1, 0, 3), values.transpose(2, 1, 0, 3)
        self._drop_front()
        at = self.length - self._start
        self.keys = _written(self.keys, at, self._packed(keys))
        self.values = _written(self.values, at, self._packed(values))
        self.length += keys.shape[2]
        self._fetched = at if self._window is None else min(at, self._window - 1)
        self._fetched += keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """What the last update returned; layers that share another's cache read it again."""
        end = self.length - self._start
        fetched = tree_map(lambda x: x[..., end - self._fetched : end, :], (self.keys, self.values))
        tree = self._layout.tree
        if tree is not None and tree.by_nodes:
            fetched = tree_map(lambda x: mx.broadcast_to(x, (tree.depth.size, *x.shape[1:])), fetched)
        keys, values = fetched
        return keys, values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Who sees whom among the rows that the next update will fetch; None or "causal" where that says it."""
        used = self.length - self._start
        cached = used if self._window is None else min(used, self._window - 1)
        window = min((w for w in (self._window, window_size) if w is not None), default=None)
        if self._layout.tree is not None:
            return self._layout.mask(cached, window)
        if window is not None and cached + N > window:
            return create_causal_mask(N, cached, window_size=window)
        if N == 1:
            return None
        return create_causal_mask(N, cached) if return_array else "causal"

    def size(self) -> int:
        return self.length

    def empty(self) -> bool:
        return self.keys is None

    @property
    def state(self) -> tuple[Any, Any]:
        """The buffers, for whoever wants them computed."""
        return self.keys, self.values

    def reaches(self, position: int) -> bool:
        """Whether the rows that a token at `position` sees are all here."""
        return position <= self.length and self._start <= max(0, position - (self._window or 0) + 1)

    def branched(self, n: int) -> KeyValues:
        """A copy with `n` batch rows, which leaves this one as it is."""
        other = copy.copy(self)
        used = self.length - self._start
        other.keys, other.values = tree_map(
            lambda x: None if x is None else mx.broadcast_to(x[..., :used, :], (n, *x.shape[1:-2], used, x.shape[-1])),
            (self.keys, self.values),
        )
        return other

    def excerpt(self, sink: int, window: int) -> KeyValues:
        """A copy of the first `sink` rows and the last `window` alone, that goes on from the same position; of the last
        of both numbers where this one has a window itself."""
        if self._window is not None:
            sink, window = 0, sink + window
        used = self.length - self._start
        sink = min(sink, used)
        tail = max(sink, used - window)  # where the last rows begin
        other = copy.copy(self)
        other._start += tail - sink
        other.keys, other.values = tree_map(
            lambda x: None if x is None else mx.concatenate([x[..., :sink, :], x[..., tail:used, :]], axis=-2),
            (self.keys, self.values),
        )
        return other

    def cut(self, position: int) -> None:
        self.length = position

    def gather(self, position: int, rows: Sequence[int]) -> None:
        """Move the `rows` (counted from `position`) of the last forward to `position`, and cut behind them."""
        at = position - self._start
        index = mx.array([at + row for row in rows])
        self.keys = tree_map(lambda x: _written(x, at, mx.take(x, index, axis=-2)), self.keys)
        self.values = tree_map(lambda x: _written(x, at, mx.take(x, index, axis=-2)), self.values)
        self.cut(position + len(rows))

    def mark(self, *, deep: bool) -> Any:
        """What `restore` takes; a deep one outlives any number of further tokens, but copies a window."""
        buffers = tree_map(copy.copy, (self.keys, self.values)) if deep and self._window is not None else None
        return self.length, self._start, buffers

    def holds(self, mark: Any) -> bool:
        """Whether `mark` can still be restored."""
        length, _, buffers = mark
        return buffers is not None or self.reaches(length)

    def restore(self, mark: Any) -> None:
        length, start, buffers = mark
        if buffers is not None:
            self.keys, self.values = tree_map(copy.copy, buffers)
            self._start = start
        self.length = length

    def _drop_front(self) -> None:
        """Forget rows that no cut within SLACK can need; once in a while, so that it costs little."""
        used = self.length - self._start
        if self._window is None or used <= self._window + 2 * SLACK:
            return
        drop = used - self._window - SLACK
        self.keys, self.values = tree_map(lambda x: mx.contiguous(x[..., drop:used, :]), (self.keys, self.values))
        self._start += drop

    def _packed(self, x: Any) -> Any:
        return mx.quantize(x, group_size=self.group_size, bits=self.bits) if hasattr(self, "bits") else x


def _written(buffer: Any, at: int, rows: Any) -> Any:
    """`buffer` with `rows` [..., n, width] at `at`, grown if need be; both may be tuples of arrays."""
    if not isinstance(rows, mx.array):
        buffers = buffer or [None] * len(rows)
        return tuple(_written(old, at, new) for old, new in zip(buffers, rows, strict=True))
    end = at + rows.shape[-2]
    room = 0 if buffer is None else buffer.shape[-2]
    if end > room:
        more = (end - at + _STEP - 1) // _STEP * _STEP
        fresh = mx.zeros((*rows.shape[:-2], more, rows.shape[-1]), rows.dtype)
        buffer = fresh if buffer is None else mx.concatenate([buffer[..., :at, :], fresh], axis=-2)
    buffer[..., at:end, :] = rows
    return buffer
