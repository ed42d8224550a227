"""When training may compute: not while this machine answers, not on battery, not longer than its user allows."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from time import sleep
from typing import Literal

from edgespec.core.protocols import CheckCancelled
from edgespec.errors import InvalidRequest
from edgespec.service.activity import is_any_engine_working
from edgespec.service.power import is_on_battery

StopReason = Literal["time", "battery"]

_POLL_S = 0.2
_NICENESS = 5


def lower_priority() -> None:
    """Let other processes go first, from now on."""
    with suppress(OSError):
        os.nice(_NICENESS)


@dataclass(frozen=True, slots=True)
class Pace:
    """Asked before each step. Raises InvalidRequest for a limit that is not a number.

    limit_s    seconds of training steps; pauses, and what is read before and between them, come on top
    must_wait  whether something more urgent runs on the machine
    must_stop  whether its power is too dear; give `lambda: False` to train on battery too
    """

    limit_s: float = inf
    must_wait: Callable[[], bool] = is_any_engine_working
    must_stop: Callable[[], bool] = is_on_battery

    def __post_init__(self) -> None:
        if not self.limit_s >= 0:
            raise InvalidRequest(f"a training cannot take {self.limit_s:g} seconds.", hint="Choose a positive number.")

    def wait(self, check: CheckCancelled) -> None:
        """Return when nothing more urgent runs. Raises Cancelled."""
        check()
        while self.must_wait():
            sleep(_POLL_S)
            check()

    def before_step(self, trained_s: float, check: CheckCancelled) -> StopReason | None:
        """Return when the next step may begin, or why none may, after `trained_s` of training. Raises Cancelled."""
        self.wait(check)
        if trained_s >= self.limit_s:
            return "time"
        return "battery" if self.must_stop() else None
