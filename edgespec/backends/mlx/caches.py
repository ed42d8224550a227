"""All caches of one sequence, as the model wants them, with one way to cut them back."""

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

from edgespec.backends.mlx.keyvalues import KeyValues, Packing
from edgespec.backends.mlx.layout import Layout
from edgespec.errors import BackendError


class RecurrentCache:
    """Recurrent states, which can only be saved and put back. Models bind new arrays, so keeping old ones is a copy."""

    def __init__(self, cache: ArraysCache) -> None:
        self.cache = cache

    @property
    def state(self) -> list[Any]:
        return [array for array in self.cache.cache if array is not None]

    def mark(self, *, deep: bool) -> Any:
        return list(self.cache.cache)

    def holds(self, mark: Any) -> bool:
        return True

    def branched(self, n: int) -> ArraysCache:
        """A copy with `n` batch rows, which leaves this one as it is."""
        other = ArraysCache(len(self.cache.cache))
        other.cache = [x if x is None else mx.broadcast_to(x, (n, *x.shape[1:])) for x in self.cache.cache]
        return other

    def restore(self, mark: Any) -> None:
        self.cache.cache = list(mark)


class ChunkedCache:
    """llama4's chunked attention: rows before the chunk in use are dropped."""

    def __init__(self, cache: ChunkedKVCache) -> None:
        self.cache = cache

    @property
    def state(self) -> tuple[Any, Any]:
        return self.cache.keys, self.cache.values

    def reaches(self, position: int) -> bool:
        start, end = self.cache.start_position, self.cache.offset
        return bool(position <= end and start <= max(0, position - self.cache.chunk_size))

    def cut(self, position: int) -> None:
        self.cache.offset = position

    def mark(self, *, deep: bool) -> Any:
        return self.cache.offset

    def holds(self, mark: Any) -> bool:
        return self.reaches(mark)

    def restore(self, mark: Any) -> None:
        self.cache.offset = mark


Leaf = KeyValues | RecurrentCache | ChunkedCache


def _entry(leaf: Leaf) -> Any:
    """What the model takes for this leaf."""
    return leaf if isinstance(leaf, KeyValues) else leaf.cache


class Caches:
    """The caches of one sequence; `entries` is the list that the model takes.

    Raises BackendError for a kind of cache that cannot be rolled back.
    """

    def __init__(self, model: Any, layout: Layout, packing: Packing | None = None) -> None:
        self._leaves: list[Leaf] = []
        self._layout = layout
        self._packing = packing
        self.entries = [self._adapted(cache) for cache in make_prompt_cache(model)]

    @property
    def can_cut(self) -> bool:
        """Whether any tail can be cut off; else only marks can be gone back to."""
        return not any(isinstance(leaf, RecurrentCache) for leaf in self._leaves)

    @property
    def gathers(self) -> bool:
        """Whether rows of a forward can be moved, as a tree in one batch row needs."""
        return all(isinstance(leaf, KeyValues) for leaf in self._leaves)

    @property
    def branches(self) -> bool:
        """Whether a forward may be given a batch row for each branch of a tree."""
        return not any(isinstance(leaf, ChunkedCache) for leaf in self._leaves)

    @property
    def state(self) -> list[Any]:
        """Every array, for whoever wants them computed."""
        return [leaf.state for leaf in self._leaves]

    @property
    def recurrent(self) -> list[Any]:
        """The recurrent arrays, which a forward's scores do not wait for."""
        return [leaf.state for leaf in self._leaves if isinstance(leaf, RecurrentCache)]

    def reaches(self, position: int) -> bool:
        return self.can_cut and all(
            leaf.reaches(position) for leaf in self._leaves if not isinstance(leaf, RecurrentCache)
        )

    def cut(self, position: int) -> None:
        for leaf in self._leaves:
            assert not isinstance(leaf, RecurrentCache)
            leaf.cut(position)

    def gather(self, position: int, rows: list[int]) -> None:
        """Keep these rows of the last forward, counted from `position`, where it began."""
        for leaf in self._leaves:
            assert isinstance(leaf, KeyValues)
            leaf.gather(position, rows)

    def mark(self, *, deep: bool = False) -> list[Any]:
        """The present state, for `restore`; a deep mark outlives any number of further tokens."""
        return [leaf.mark(deep=deep) for leaf in self._leaves]

    def holds(self, mark: list[Any]) -> bool:
        """Whether `mark` can still be restored."""
        return all(leaf.holds(saved) for leaf, saved in zip(self._leaves, mark, strict=True))

    def restore(self, mark: list[Any]) -> None:
        for leaf, saved in zip(self._leaves, mark, strict=True):
            leaf.restore(saved)

    def branched(self, n: int) -> list[Any]:
        """Entries with `n` batch rows for one forward, which leaves these caches as they are."""
        copies = {id(_entry(leaf)): leaf.branched(n) for leaf in self._leaves if not isinstance(leaf, ChunkedCache)}

        def replaced(entry: Any) -> Any:
            if isinstance(entry, CacheList):
                return CacheList(*(replaced(each) for each in entry.caches))
            return copies[id(entry)]

        return [replaced(entry) for entry in self.entries]

    def _adapted(self, cache: Any) -> Any:
        """The cache to use in place of mlx-lm's own `cache`."""
        kind = type(cache)
        if kind is CacheList:
            return CacheList(*(self._adapted(each) for each in cache.caches))
        if kind is ArraysCache:
            self._leaves.append(RecurrentCache(cache))
            return cache
        if kind is ChunkedKVCache:
            self._leaves.append(ChunkedCache(cache))
            return cache
        if kind is KVCache:
            leaf = KeyValues(self._layout, packing=self._packing)
        elif kind is RotatingKVCache and cache.keep == 0:
            leaf = KeyValues(self._layout, window=cache.max_size, packing=self._packing)
        else:
            raise BackendError(
                f"the model's cache of kind {kind.__name__} cannot be rolled back.", hint="Use --backend llamacpp."
            )
        self._leaves.append(leaf)
        return leaf
