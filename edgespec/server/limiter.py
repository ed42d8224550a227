"""FairLimiter: limits concurrent calls, or gives one call exclusive access, in the order of arrival."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairLimiter:
    """A fair semaphore with a limit that can change, and with exclusive access."""

    def __init__(self, max_concurrency: int = 1) -> None:
        self.waiting = 0  # callers in `enter`; those in `exclusive` do not count
        self.visitors = 0
        self._max_concurrency = max_concurrency
        self._active = 0
        self._is_exclusive = False
        self._reopened = asyncio.Event()
        self._queue: deque[tuple[asyncio.Future[None], bool]] = deque()

    @property
    def max_concurrency(self) -> int:
        """How many callers may be inside at once."""
        return self._max_concurrency

    @max_concurrency.setter
    def max_concurrency(self, limit: int) -> None:
        self._max_concurrency = limit
        self._admit()

    @property
    def active(self) -> int:
        return self._active

    @property
    def is_full(self) -> bool:
        """Whether a new caller has to wait."""
        return bool(self._queue) or self._is_exclusive or self._active >= self._max_concurrency

    async def enter(self) -> None:
        """Wait for a turn; `leave` ends it."""
        self.waiting += 1
        try:
            await self._enter(exclusive=False)
        finally:
            self.waiting -= 1

    def leave(self) -> None:
        self._active -= 1
        self._is_exclusive = False
        self._reopened.set()
        self._admit()

    @asynccontextmanager
    async def visit(self) -> AsyncIterator[None]:
        """Be inside beside the callers, whatever the limit. Waits for nobody but one that has exclusive access."""
        while self._is_exclusive:
            self._reopened.clear()
            await self._reopened.wait()
        self.visitors += 1
        try:
            yield
        finally:
            self.visitors -= 1
            self._admit()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Wait until all have left; new callers wait until this context ends."""
        await self._enter(exclusive=True)
        try:
            yield
        finally:
            self.leave()

    async def _enter(self, *, exclusive: bool) -> None:
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((admitted, exclusive))
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():  # admitted just before the cancellation
                self.leave()
            self._admit()  # the next caller in the queue
            raise

    def _admit(self) -> None:
        while self._queue and not self._is_exclusive:
            admitted, exclusive = self._queue[0]
            if admitted.cancelled():
                self._queue.popleft()
                continue
            if self._active and (exclusive or self._active >= self._max_concurrency):
                return
            if self.visitors and exclusive:
                return
            self._queue.popleft()
            self._active += 1
            self._is_exclusive = exclusive
            admitted.set_result(None)
