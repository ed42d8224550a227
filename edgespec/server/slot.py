"""Slot: a model that requests name, and the queue of those requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic

from edgespec.server.limiter import FairLimiter
from edgespec.server.metrics import ServerMetrics
from edgespec.server.policy import Busy, Policy
from edgespec.server.record import current_record
from edgespec.service.client import ModelInfo
from edgespec.service.response import Part


@dataclass(frozen=True, slots=True)
class Turn:
    """The turn of a call. `ends_s`: when its time is over, in seconds of `monotonic`. `model_info`: the loaded model;
    None for one of another server.
    """

    ends_s: float
    model_info: ModelInfo | None = None


Answer = Callable[[Turn, int], AsyncGenerator[list[Part], None]]
"""One answer in a turn, which ends with it: its parts, in batches. The number is that among the answers to a prompt."""


class Slot:
    """What models of this machine and of other servers share."""

    def __init__(self, name: str, max_concurrency: int, policy: Policy, server_metrics: ServerMetrics) -> None:
        """`max_concurrency`: calls that may have a turn at once."""
        self.name = name
        self.limiter = FairLimiter(max_concurrency)
        self.used_s = monotonic()
        self._policy = policy
        self._server_metrics = server_metrics

    @property
    def is_busy(self) -> bool:
        limiter = self.limiter
        return limiter.active + limiter.waiting + limiter.visitors > 0

    async def enter(self, *, is_new: bool = True) -> None:
        """Wait for a turn; `leave` ends it. Raises Busy if `is_new` and the queue is full."""
        current_record().model = self.name
        limiter = self.limiter
        if is_new and limiter.is_full and limiter.waiting >= self._policy.max_queue:
            mean_s = self._server_metrics.seconds_a_call(self.name)
            after_s = max(1, round(mean_s * limiter.waiting / limiter.max_concurrency))
            message = f"{limiter.waiting} requests are waiting for this model."
            raise Busy(message, hint=f"Try again in {after_s} seconds.", retry_after_s=after_s)
        await limiter.enter()
        self.used_s = monotonic()

    def leave(self) -> None:
        self.used_s = monotonic()
        self.limiter.leave()

    @asynccontextmanager
    async def visit(self) -> AsyncIterator[None]:
        """Keep the model from being unloaded. Takes no turn, no place in the queue, and no part in the metrics."""
        current_record().model = self.name
        async with self.limiter.visit():
            try:
                yield
            finally:
                self.used_s = monotonic()
