"""All caches of one sequence, as the model takes them, with one way to trim them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from edgespec.backends.mlx.forward_context import ForwardContext
from edgespec.backends.mlx.keyvalues import KeyValues, KVQuantization
from edgespec.errors import BackendError


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

    def branch(self, n: int) -> ArraysCache:
        """A copy with `n` batch rows; this one does not change."""
        other = ArraysCache(len(self.cache.cache))
        other.cache = [x if x is None else mx.broadcast_to(x, (n, *x.shape[1:])) for x in self.cache.cache]
        return other

    def restore(self, snapshot: Any) -> None:
        self.cache.cache = list(snapshot)


class ChunkedCache:
    """llama4's chunked attention, which drops the rows before the present chunk."""

    def __init__(self, cache: ChunkedKVCache) -> None:
        self.cache = cache

    @property
    def state(self) -> tuple[Any, Any]:
        return self.cache.keys, self.cache.values

    def can_trim_to(self, position: int) -> bool:
        start, end = self.cache.start_position, self.cache.offset
        return bool(position <= end and start <= max(0, position - self.cache.chunk_size))

    def trim_to(self, position: int) -> None:
        self.cache.offset = position

    def take_snapshot(self, *, deep: bool) -> Any:
        return self.cache.offset

    def can_restore(self, snapshot: Any) -> bool:
        return self.can_trim_to(snapshot)

    def restore(self, snapshot: Any) -> None:
        self.cache.offset = snapshot


Leaf = KeyValues | RecurrentCache | ChunkedCache


def _entry(leaf: Leaf) -> Any:
    """The object that the model takes for this leaf."""
    return leaf if isinstance(leaf, KeyValues) else leaf.cache


class Caches:
    """The caches of one sequence; `entries` is the list that the model takes.

    Raises BackendError for a class of cache that cannot be rolled back.
    """

    def __init__(self, model: Any, context: ForwardContext, quantization: KVQuantization | None = None) -> None:
        self._leaves: list[Leaf] = []
        self._context = context
        self._quantization = quantization
        self.entries = [self._adapt(cache) for cache in make_prompt_cache(model)]

    @property
    def can_trim(self) -> bool:
        """Whether any tail can be dropped; else only snapshots can be restored."""
        return not any(isinstance(leaf, RecurrentCache) for leaf in self._leaves)

    @property
    def can_gather(self) -> bool:
        """Whether rows of a forward can be moved, which a tree in one batch row needs."""
        return all(isinstance(leaf, KeyValues) for leaf in self._leaves)

    @property
    def can_branch(self) -> bool:
        """Whether a forward can have a batch row for each branch of a tree."""
        return not any(isinstance(leaf, ChunkedCache) for leaf in self._leaves)

    @property
    def state(self) -> list[Any]:
        """Every array, for mx.eval."""
        return [leaf.state for leaf in self._leaves]

    @property
    def recurrent(self) -> list[Any]:
        """The recurrent arrays, which the scores of a forward do not depend on."""
        return [leaf.state for leaf in self._leaves if isinstance(leaf, RecurrentCache)]

    def can_trim_to(self, position: int) -> bool:
        return self.can_trim and all(
            leaf.can_trim_to(position) for leaf in self._leaves if not isinstance(leaf, RecurrentCache)
        )

    def trim_to(self, position: int) -> None:
        for leaf in self._leaves:
            assert not isinstance(leaf, RecurrentCache)
            leaf.trim_to(position)

    def extend(self, n: int) -> bool:
        """Hold copies of the present rows up to position `n`; False, and nothing changed, where a cache cannot.

        Recurrent states stay as they are.
        """
        if any(isinstance(leaf, ChunkedCache) for leaf in self._leaves):
            return False
        for leaf in self._leaves:
            if isinstance(leaf, KeyValues):
                leaf.extend(n)
        return True

    def gather(self, position: int, rows: list[int]) -> None:
        """Keep these rows of the last forward, counted from its start at `position`."""
        for leaf in self._leaves:
            assert isinstance(leaf, KeyValues)
            leaf.gather(position, rows)

    def take_snapshot(self, *, deep: bool = False) -> list[Any]:
        """The present state, for `restore`; a deep one outlives any number of further tokens."""
        return [leaf.take_snapshot(deep=deep) for leaf in self._leaves]

    def can_restore(self, snapshot: list[Any]) -> bool:
        """Whether `snapshot` can still be restored."""
        return all(leaf.can_restore(saved) for leaf, saved in zip(self._leaves, snapshot, strict=True))

    def restore(self, snapshot: list[Any]) -> None:
        for leaf, saved in zip(self._leaves, snapshot, strict=True):
            leaf.restore(saved)

    def branch(self, n: int) -> list[Any]:
        """Entries with `n` batch rows for one forward; these caches do not change."""
        copies = {id(_entry(leaf)): leaf.branch(n) for leaf in self._leaves if not isinstance(leaf, ChunkedCache)}

        def replace(entry: Any) -> Any:
            if isinstance(entry, CacheList):
                return CacheList(*(replace(each) for each in entry.caches))
            return copies[id(entry)]

        return [replace(entry) for entry in self.entries]

    def _adapt(self, cache: Any) -> Any:
        """The cache that stands in for mlx-lm's `cache`."""
        kind = type(cache)
        if kind is CacheList:
            return CacheList(*(self._adapt(each) for each in cache.caches))
        if kind is ArraysCache:
            self._leaves.append(RecurrentCache(cache))
            return cache
        if kind is ChunkedKVCache:
            self._leaves.append(ChunkedCache(cache))
            return cache
        if kind is KVCache:
            leaf = KeyValues(self._context, quantization=self._quantization)
        elif kind is RotatingKVCache and cache.keep == 0:
            leaf = KeyValues(self._context, window=cache.max_size, quantization=self._quantization)
        else:
            raise BackendError(
                f"the model's cache of class {kind.__name__} cannot be rolled back.", hint="Use --backend llamacpp."
            )
        self._leaves.append(leaf)
        return leaf
