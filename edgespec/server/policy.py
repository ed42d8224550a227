"""The limits of a server, and the errors of requests that meet them."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.errors import EdgespecError
from edgespec.service.process import MAX_SILENCE_S


class Busy(EdgespecError):
    """The queue is full; `retry_after_s` is the estimated time until a place is free."""

    def __init__(self, message: str, *, hint: str, retry_after_s: int) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class TimedOut(EdgespecError):
    """A call took longer than the server allows, and there is no answer that could end early."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits of a server.

    max_open       models in memory
    max_queue      requests that may wait for one model
    keep_alive_s   how long an idle model stays loaded; `inf`: until another one needs its memory
    timeout_s      how long a call may take from its turn on, the loading of its model included
    max_silence_s  how long the process of a model may give no sign of life
    strict_names   whether calls must name their model, even if there is one only
    """

    max_open: int = 1
    max_queue: int = 64
    keep_alive_s: float = 300.0
    timeout_s: float = 600.0
    max_silence_s: float = MAX_SILENCE_S
    strict_names: bool = False
