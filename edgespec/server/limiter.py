"""Who may go in: some at once, or one alone, in the order they came."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairLimiter:
    """A semaphore that is fair, that may be widened, and that one can have for oneself."""

    def __init__(self, max_concurrency: int = 1) -> None:
        self.waiting = 0  # of those who do not want it for themselves
        self._at_once = max_concurrency
        self._inside = 0
        self._is_alone = False
        self._queue: deque[tuple[asyncio.Future[None], bool]] = deque()

    @property
    def max_concurrency(self) -> int:
        """How many may be inside."""
        return self._at_once

    @max_concurrency.setter
    def max_concurrency(self, most: int) -> None:
        self._at_once = most
        self._admit()

    @property
    def inside(self) -> int:
        return self._inside

    @property
    def is_full(self) -> bool:
        """Whether whoever comes now has to wait."""
        return bool(self._queue) or self._is_alone or self._inside >= self._at_once

    async def enter(self) -> None:
        """Wait for one's turn, which `leave` ends."""
        self.waiting += 1
        try:
            await self._enter(alone=False)
        finally:
            self.waiting -= 1

    def leave(self) -> None:
        self._inside -= 1
        self._is_alone = False
        self._admit()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Once all have left; others wait meanwhile."""
        await self._enter(alone=True)
        try:
            yield
        finally:
            self.leave()

    async def _enter(self, *, alone: bool) -> None:
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((admitted, alone))
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():  # it was admitted at the same moment
                self.leave()
            self._admit()  # whoever was behind it
            raise

    def _admit(self) -> None:
        while self._queue and not self._is_alone:
            admitted, alone = self._queue[0]
            if admitted.cancelled():
                self._queue.popleft()
                continue
            if self._inside and (alone or self._inside >= self._at_once):
                return
            self._queue.popleft()
            self._inside += 1
            self._is_alone = alone
            admitted.set_result(None)
