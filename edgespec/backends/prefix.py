"""How much of a cached sequence a new prompt can use again."""

from __future__ import annotations

from collections.abc import Sequence


def shared_prefix(cached: Sequence[int], tokens: Sequence[int], most: int) -> int:
    """How many leading tokens agree, at most `most`: the last one is always run, for its scores."""
    n = min(len(cached), most)
    for i in range(n):
        if cached[i] != tokens[i]:
            return i
    return n
