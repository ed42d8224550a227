"""Keys and values of one attention layer in a linear buffer, which can be trimmed even if the layer has a window.

Stands in for mlx-lm's KVCache, QuantizedKVCache and RotatingKVCache. RotatingKVCache keeps its window in a ring, whose
overwritten rows a rejected draft cannot restore.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.base import create_causal_mask

from edgespec.backends.mlx.forward_context import ForwardContext

SLACK = 128  # rows kept before a window, which bound how far it can be trimmed
_STEP = 256  # rows by which a buffer grows


@dataclass(frozen=True, slots=True)
class KVQuantization:
    """Quantization of a cache: `bits` an element, with a scale and a bias for every `group` elements."""

    bits: int
    group: int


class KeyValues:
    """Buffers [1, heads, rows, width] of the last tokens before position `length`; a `window` drops older ones.

    Models use the attributes and methods that mlx-lm's caches have.
    """

    def __init__(
        self, context: ForwardContext, window: int | None = None, quantization: KVQuantization | None = None
    ) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.length = 0
        self._context = context
        self._window = window
        self._start = 0  # position of the first row
        self._fetched = 0  # rows that the last update returned
        if quantization is not None:  # attention looks for these two attributes
            self.bits = quantization.bits
            self.group_size = quantization.group

    @property
    def offset(self) -> Any:
        """Position of the next row; [n] positions in a forward with a batch row for each draft node."""
        tree = self._context.tree
        return tree.position + tree.depth if tree is not None and tree.is_batched else self.length

    @property
    def has_window(self) -> bool:
        return self._window is not None

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        self._context.update(keys, values)
        tree = self._context.tree
        if tree is not None and tree.is_batched:
            keys, values = keys.transpose(2, 1, 0, 3), values.transpose(2, 1, 0, 3)
        self._drop_front()
        at = self.length - self._start
        self.keys = write_rows(self.keys, at, self._quantize(keys))
        self.values = write_rows(self.values, at, self._quantize(values))
        self.length += keys.shape[2]
        self._fetched = at if self._window is None else min(at, self._window - 1)
        self._fetched += keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """The result of the last update, again for layers that share the cache of another."""
        end = self.length - self._start
        fetched = tree_map(lambda x: x[..., end - self._fetched : end, :], (self.keys, self.values))
        tree = self._context.tree
        if tree is not None and tree.is_batched:
            fetched = tree_map(lambda x: mx.broadcast_to(x, (tree.depth.size, *x.shape[1:])), fetched)
        keys, values = fetched
        return keys, values

    def before(self, position: int, n: int | None) -> tuple[Any, Any]:
        """Keys and values [1, heads, rows, width] of the last `n` tokens before `position`, or of all that it holds."""
        end = position - self._start
        first = 0 if n is None else max(end - n, 0)
        rows = [tree_map(lambda x: x[..., first:end, :], each) for each in (self.keys, self.values)]
        if hasattr(self, "bits"):
            rows = [mx.dequantize(*each, group_size=self.group_size, bits=self.bits) for each in rows]
        return rows[0], rows[1]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """What N new rows attend to of the rows that the next update returns; None or "causal" where that says it."""
        used = self.length - self._start
        cached = used if self._window is None else min(used, self._window - 1)
        window = min((w for w in (self._window, window_size) if w is not None), default=None)
        if self._context.tree is not None:
            return self._context.mask(cached, window)
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
        """The buffers, for mx.eval."""
        return self.keys, self.values

    def can_trim_to(self, position: int) -> bool:
        """Whether it holds every row that a token at `position` attends to."""
        return position <= self.length and self._start <= max(0, position - (self._window or 0) + 1)

    def branch(self, n: int) -> KeyValues:
        """A copy with `n` batch rows; this one does not change."""
        other = copy.copy(self)
        used = self.length - self._start
        other.keys, other.values = tree_map(
            lambda x: None if x is None else mx.broadcast_to(x[..., :used, :], (n, *x.shape[1:-2], used, x.shape[-1])),
            (self.keys, self.values),
        )
        return other

    def extract(self, sink: int, window: int) -> KeyValues:
        """A copy with only the first `sink` rows and the last `window`, at the same position.

        With only the last sink + window rows where this one has a window itself.
        """
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

    def trim_to(self, position: int) -> None:
        self.length = position

    def extend(self, n: int) -> None:
        """Hold copies of the present rows up to position `n`."""
        if self.keys is None:  # never written
            return
        used = self.length - self._start
        rows = n if self._window is None else min(n, self._window + SLACK)
        index = mx.arange(rows) % used
        self.keys, self.values = tree_map(lambda x: mx.take(x, index, axis=-2), (self.keys, self.values))
        self.length, self._start = n, n - rows

    def gather(self, position: int, rows: Sequence[int]) -> None:
        """Keep these `rows` of the last forward, counted from its start at `position`; drop the others."""
        at = position - self._start
        index = mx.array([at + row for row in rows])
        self.keys = tree_map(lambda x: write_rows(x, at, mx.take(x, index, axis=-2)), self.keys)
        self.values = tree_map(lambda x: write_rows(x, at, mx.take(x, index, axis=-2)), self.values)
        self.trim_to(position + len(rows))

    def take_snapshot(self, *, deep: bool) -> Any:
        """The present state, for `restore`; a deep one outlives any number of further tokens, but copies a window."""
        buffers = tree_map(copy.copy, (self.keys, self.values)) if deep and self._window is not None else None
        return self.length, self._start, buffers

    def can_restore(self, snapshot: Any) -> bool:
        """Whether `snapshot` can still be restored."""
        length, _, buffers = snapshot
        return buffers is not None or self.can_trim_to(length)

    def restore(self, snapshot: Any) -> None:
        length, start, buffers = snapshot
        if buffers is not None:
            self.keys, self.values = tree_map(copy.copy, buffers)
            self._start = start
        self.length = length

    def _drop_front(self) -> None:
        """Drop the rows that no trim within SLACK needs, at most once in SLACK rows."""
        used = self.length - self._start
        if self._window is None or used <= self._window + 2 * SLACK:
            return
        drop = used - self._window - SLACK
        self.keys, self.values = tree_map(lambda x: mx.contiguous(x[..., drop:used, :]), (self.keys, self.values))
        self._start += drop

    def _quantize(self, x: Any) -> Any:
        return mx.quantize(x, group_size=self.group_size, bits=self.bits) if hasattr(self, "bits") else x


def write_rows(buffer: Any, at: int, rows: Any) -> Any:
    """`buffer` with `rows` [..., n, width] at `at`, grown if necessary; both may be tuples of arrays."""
    if not isinstance(rows, mx.array):
        buffers = buffer or [None] * len(rows)
        return tuple(write_rows(old, at, new) for old, new in zip(buffers, rows, strict=True))
    end = at + rows.shape[-2]
    capacity = 0 if buffer is None else buffer.shape[-2]
    if end > capacity:
        more = (end - at + _STEP - 1) // _STEP * _STEP
        fresh = mx.zeros((*rows.shape[:-2], more, rows.shape[-1]), rows.dtype)
        buffer = fresh if buffer is None else mx.concatenate([buffer[..., :at, :], fresh], axis=-2)
    buffer[..., at:end, :] = rows
    return buffer
