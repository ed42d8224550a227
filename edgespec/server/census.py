"""Census: how many connections there are, and from where."""

from __future__ import annotations

from collections import Counter


class Census:
    """Counts connections. There may be `limit` of them, half as many from one address."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: Counter[str] = Counter()

    def enter(self, address: str) -> bool:
        """Count a connection; whether it may stay. `leave` follows in both cases."""
        self._counts[address] += 1
        return self._counts[address] <= self._limit // 2 and self._counts.total() <= self._limit

    def leave(self, address: str) -> None:
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]
