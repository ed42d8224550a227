"""All caches of one sequence, as the model takes them, with one way to trim them.

`KeyValues` keeps one attention layer in a linear buffer, which can be trimmed even if the layer has a window. It stands
in for mlx-lm's KVCache, QuantizedKVCache and RotatingKVCache. The last keeps its window in a ring, whose overwritten
rows a rejected draft cannot restore.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from edgespec.backends.mlx.forward import ForwardContext
from edgespec.errors import BackendError

SLACK = 128  # rows kept before a window, which bound how far it can be trimmed
_STEP = 256  # rows by which a buffer grows
KVQuantization = tuple[int, int]
"""(bits of an element, number of elements that share a scale and a bias) of a quantized cache."""


class KeyValues:
    """Buffers [1, heads, rows, width] of the last tokens before position `length`; a `window` drops older ones."""

    def __init__(
        self, context: ForwardContext, window: int | None = None, quantization: KVQuantization | None = None
    ) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.length = 0
        self.context = context
        self.window = window
        self._start = 0  # position of the first row
        self._fetched = 0  # rows that the last update returned
        if quantization is not None:  # attention looks for these two attributes
            self.bits, self.group_size = quantization

    @property
    def offset(self) -> Any:
        """Position of the next row."""
        return self.length

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        self.context.update(keys, values)
        self._drop_front()
        at = self.length - self._start
        self.keys = write_rows(self.keys, at, self._quantize(keys))
        self.values = write_rows(self.values, at, self._quantize(values))
        self.length += keys.shape[2]
        self._fetched = at if self.window is None else min(at, self.window - 1)
        self._fetched += keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """The result of the last update, again for layers that share the cache of another."""
        end = self.length - self._start
        keys, values = tree_map(lambda x: x[..., end - self._fetched : end, :], (self.keys, self.values))
        return keys, values

    def before(self, position: int, n: int | None) -> tuple[Any, Any]:
        """Keys and values [1, heads, rows, width] of the last `n` (None: all) kept tokens before `position`."""
        end = position - self._start
        first = 0 if n is None else max(end - n, 0)
        rows = [tree_map(lambda x: x[..., first:end, :], each) for each in (self.keys, self.values)]
        if hasattr(self, "bits"):
            rows = [mx.dequantize(*each, group_size=self.group_size, bits=self.bits) for each in rows]
        return rows[0], rows[1]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask of N new rows over the rows that the next update returns; None if there is none, or "causal"."""
        used = self.length - self._start
        cached = used if self.window is None else min(used, self.window - 1)
        window = min((w for w in (self.window, window_size) if w is not None), default=None)
        if self.context.tree is not None:
            return self.context.mask(cached, window)
        if window is not None and cached + N > window:
            return create_causal_mask(N, cached, window_size=window)
        if N == 1:
            return None
        return create_causal_mask(N, cached) if return_array else "causal"

    @property
    def state(self) -> tuple[Any, Any]:
        """The buffers, for mx.eval."""
        return self.keys, self.values

    def can_rewind(self, position: int) -> bool:
        """Whether it holds every row that a token at `position` attends to."""
        return position <= self.length and self._start <= max(0, position - (self.window or 0) + 1)

    def extract(self, sink: int, window: int) -> KeyValues:
        """A copy with the first `sink` and last `window` rows; if this cache has a window, the last sink + window."""
        if self.window is not None:
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

    def rewind(self, position: int) -> None:
        self.length = position

    def keep(self, position: int, rows: Sequence[int]) -> None:
        """Hold the tokens before `position`, then these `rows` of the forward that started there."""
        if list(rows) != list(range(len(rows))):
            at = position - self._start
            index = mx.array([at + row for row in rows])
            self.keys, self.values = tree_map(
                lambda x: write_rows(x, at, mx.take(x, index, axis=-2)), (self.keys, self.values)
            )
        self.length = position + len(rows)

    def extend(self, n: int) -> None:
        """Hold copies of the present rows up to position `n`."""
        if self.keys is None:  # never written
            return
        used = self.length - self._start
        rows = n if self.window is None else min(n, self.window + SLACK)
        index = mx.arange(rows) % used
        self.keys, self.values = tree_map(lambda x: mx.take(x, index, axis=-2), (self.keys, self.values))
        self.length, self._start = n, n - rows

    def take_snapshot(self, *, deep: bool) -> Any:
        """The present state, for `restore`; a deep one outlives any number of further tokens, but copies a window."""
        buffers = tree_map(copy.copy, (self.keys, self.values)) if deep and self.window is not None else None
        return self.length, self._start, buffers

    def can_restore(self, snapshot: Any) -> bool:
        return snapshot[2] is not None or self.can_rewind(snapshot[0])

    def restore(self, snapshot: Any) -> None:
        length, start, buffers = snapshot
        if buffers is not None:
            self.keys, self.values = tree_map(copy.copy, buffers)
            self._start = start
        self.length = length

    def save(self) -> dict[str, Any]:
        """The rows that are held, and where they are."""
        place = {"place": mx.array([self.length, self._start])}
        if self.keys is None:  # never written
            return place
        used = self.length - self._start
        keys, values = tree_map(lambda x: x[..., :used, :], (self.keys, self.values))
        return {"keys": keys, "values": values, **place}

    def load(self, saved: dict[str, Any]) -> None:
        self.length, self._start = saved["place"].tolist()
        self.keys, self.values = saved.get("keys"), saved.get("values")

    def _drop_front(self) -> None:
        """Drop the rows that no trim within SLACK needs, at most once in SLACK rows."""
        used = self.length - self._start
        if self.window is None or used <= self.window + 2 * SLACK:
            return
        drop = used - self.window - SLACK
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


class RecurrentCache:
    """Recurrent states, which can only be saved and restored. Models bind new arrays and leave the old ones alone."""

    def __init__(self, cache: ArraysCache) -> None:
        self.cache = cache

    @property
    def state(self) -> list[Any]:
        return [array for array in self.cache.cache if array is not None]

    def take_snapshot(self, *, deep: bool) -> Any:
        return list(self.cache.cache)

    def can_restore(self, snapshot: Any) -> bool:
        return True

    def restore(self, snapshot: Any) -> None:
        self.cache.cache = list(snapshot)

    def save(self) -> dict[str, Any]:
        return {f"state {i}": array for i, array in enumerate(self.cache.cache) if array is not None}

    def load(self, saved: dict[str, Any]) -> None:
        self.cache.cache = [saved.get(f"state {i}") for i in range(len(self.cache.cache))]


class ChunkedCache:
    """llama4's chunked attention, which drops the rows before the present chunk."""

    def __init__(self, cache: ChunkedKVCache) -> None:
        self.cache = cache

    @property
    def state(self) -> tuple[Any, Any]:
        return self.cache.keys, self.cache.values

    def can_rewind(self, position: int) -> bool:
        start, end = self.cache.start_position, self.cache.offset
        return bool(position <= end and start <= max(0, position - self.cache.chunk_size))

    def keep(self, position: int, rows: Sequence[int]) -> None:
        self.cache.offset = position + len(rows)

    def take_snapshot(self, *, deep: bool) -> Any:
        return self.cache.offset

    def can_restore(self, snapshot: Any) -> bool:
        return self.can_rewind(snapshot)

    def restore(self, snapshot: Any) -> None:
        self.cache.offset = snapshot


Leaf = KeyValues | RecurrentCache | ChunkedCache


class Caches:
    """The caches of one sequence.

    entries     the list that the model takes
    can_trim    whether any tail can be dropped; else only snapshots can be restored
    can_gather  whether rows of a forward can be moved, which a tree needs

    Raises BackendError for a class of cache that cannot be rolled back.
    """

    def __init__(self, model: Any, context: ForwardContext, quantization: KVQuantization | None = None) -> None:
        self._leaves: list[Leaf] = []
        self._context = context
        self._quantization = quantization
        self.entries = [self._adapt(cache) for cache in make_prompt_cache(model)]
        self.can_trim = not any(isinstance(leaf, RecurrentCache) for leaf in self._leaves)
        self.can_gather = all(isinstance(leaf, KeyValues) for leaf in self._leaves)

    @property
    def state(self) -> list[Any]:
        """Every array, for mx.eval."""
        return [leaf.state for leaf in self._leaves]

    @property
    def recurrent(self) -> list[Any]:
        """The recurrent arrays, which the scores of a forward do not depend on."""
        return [leaf.state for leaf in self._leaves if isinstance(leaf, RecurrentCache)]

    def can_rewind(self, position: int) -> bool:
        return self.can_trim and all(
            leaf.can_rewind(position) for leaf in self._leaves if not isinstance(leaf, RecurrentCache)
        )

    def keep(self, position: int, rows: Sequence[int] = ()) -> None:
        """Hold the tokens before `position`, then these `rows` of the forward that started there."""
        for leaf in self._leaves:
            assert not isinstance(leaf, RecurrentCache)
            leaf.keep(position, rows)

    def extend(self, n: int) -> bool:
        """Hold copies of the rows, but for recurrent states, up to position `n`; False if a cache cannot."""
        if any(isinstance(leaf, ChunkedCache) for leaf in self._leaves):
            return False
        for leaf in self._leaves:
            if isinstance(leaf, KeyValues):
                leaf.extend(n)
        return True

    def take_snapshot(self, *, deep: bool = False) -> list[Any]:
        """The present state, for `restore`; a deep one outlives any number of further tokens."""
        return [leaf.take_snapshot(deep=deep) for leaf in self._leaves]

    def can_restore(self, snapshot: list[Any]) -> bool:
        return all(leaf.can_restore(saved) for leaf, saved in zip(self._leaves, snapshot, strict=True))

    def restore(self, snapshot: list[Any]) -> None:
        for leaf, saved in zip(self._leaves, snapshot, strict=True):
            leaf.restore(saved)

    def save(self) -> dict[str, Any] | None:
        """Every array of the text by a name; None for classes of caches that cannot be saved."""
        leaves = [leaf for leaf in self._leaves if not isinstance(leaf, ChunkedCache)]
        if len(leaves) < len(self._leaves):
            return None
        return dict(tree_flatten({str(i): leaf.save() for i, leaf in enumerate(leaves)}))

    def load(self, arrays: dict[str, Any]) -> None:
        """Hold what the caches of the same model have saved. Raises KeyError, ValueError for other arrays."""
        saved = {str(i): dict[str, Any]() for i in range(len(self._leaves))}
        for name, array in arrays.items():
            number, _, part = name.partition(".")
            saved[number][part] = array
        for leaf, parts in zip(self._leaves, saved.values(), strict=True):
            assert not isinstance(leaf, ChunkedCache)
            leaf.load(tree_unflatten(list(parts.items())))

    def _adapt(self, cache: Any) -> Any:
        """The cache that stands in for mlx-lm's `cache`."""
        kind = type(cache)
        if kind is CacheList:
            return CacheList(*(self._adapt(each) for each in cache.caches))
        if kind in (ArraysCache, ChunkedKVCache):
            self._leaves.append(RecurrentCache(cache) if kind is ArraysCache else ChunkedCache(cache))
            return cache
        has_window = kind is RotatingKVCache and cache.keep == 0
        if kind is not KVCache and not has_window:
            raise BackendError(
                f"the model's cache of class {kind.__name__} cannot be rolled back.", hint="Use --backend llamacpp."
            )
        leaf = KeyValues(self._context, cache.max_size if has_window else None, self._quantization)
        self._leaves.append(leaf)
        return leaf
