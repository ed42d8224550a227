"""Options of a training run. Nothing here needs MLX."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from time import monotonic, sleep
from typing import Literal, get_args

from edgespec.cancel import Check, cancellable, check_cancelled, current_check
from edgespec.engine.activity import is_any_engine_working
from edgespec.train.learn import is_on_battery

Weights = Literal["full", "lora"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
"""What is trained: all weights, or low-rank changes of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """How a network is trained.

    learning_rate  AdamW's highest one, at the end of the warm-up; it then falls to 0 as a half cosine
    muon_rate      likewise Muon's, which trains the inner matrices of a head; 0: AdamW trains them too
    epochs         how often every text is read, if the time allows it
    warm_up        share of the steps in which the learning rate rises
    weight_decay   AdamW's
    max_norm       the gradient is scaled down to this norm
    checkpoint_s   seconds between two checkpoints
    seed           of the order of the texts, and of MLX's random numbers
    start          names the weights to begin with: a checkpoint of a run with other options is not used
    """

    learning_rate: float = 1e-4
    muon_rate: float = 0.0
    epochs: int = 3
    warm_up: float = 0.05
    weight_decay: float = 0.01
    max_norm: float = 1.0
    checkpoint_s: float = 60.0
    seed: int = 0
    start: str = ""


StopReason = Literal["time", "battery"]

CHECKPOINT = "checkpoint"
"""The file of a run that is not complete."""

_POLL_S = 0.2
_NICENESS = 5


def lower_priority() -> None:
    """Let other processes go first, from now on."""
    with suppress(OSError):
        os.nice(_NICENESS)


class Allowance:
    """The time that a run may take from now on, all its parts together; pauses come on top.

    reserve_s  seconds that are kept for what follows the training
    paused_s   seconds that took nothing of it so far
    """

    def __init__(self, limit_s: float = inf) -> None:
        self.limit_s, self.reserve_s, self.paused_s = limit_s, 0.0, 0.0
        self._end_s = monotonic() + limit_s

    def clock(self) -> float:
        """Seconds of a clock that stands still in pauses."""
        return monotonic() - self.paused_s

    @property
    def left_s(self) -> float:
        """Seconds that are left, the reserve not counted."""
        return self._end_s - self.clock() - self.reserve_s

    @contextmanager
    def extended(self) -> Iterator[None]:
        """What happens within takes nothing of it."""
        start_s = monotonic()
        try:
            yield
        finally:
            self.paused_s += monotonic() - start_s


@dataclass(frozen=True, slots=True)
class Throttle:
    """When training may compute: not while this machine answers, not on battery, not longer than its user allows.

    allowance  the time of the whole run
    must_wait  whether something more urgent runs on the machine
    must_stop  whether to save power, as on battery; give `lambda: False` to train on battery too
    """

    allowance: Allowance = field(default_factory=Allowance)
    must_wait: Callable[[], bool] = is_any_engine_working
    must_stop: Callable[[], bool] = is_on_battery

    def wait(self) -> None:
        """Return when nothing more urgent runs. Raises Cancelled."""
        self._wait(check_cancelled)

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Work inside pauses where it polls for cancellation, while something more urgent runs."""
        with cancellable(partial(self._wait, current_check())):
            yield

    def _wait(self, check: Check) -> None:
        check()
        if not self.must_wait():
            return
        with self.allowance.extended():
            while self.must_wait():
                sleep(_POLL_S)
                check()

    def before_step(self) -> StopReason | None:
        """Return when the next step may begin, or why none may. Raises Cancelled."""
        self.wait()
        if self.allowance.left_s <= 0:
            return "time"
        return "battery" if self.must_stop() else None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a training is: after a step, or at its end, when the network has the trained weights.

    loss      of the last step
    seconds   of training so far, those before a resume included, without pauses
    is_epoch  whether all texts were read once more, and steps follow
    stopped   why it ended before its last step; None if it did not
    """

    step: int
    n_steps: int
    loss: float
    seconds: float
    is_epoch: bool = False
    stopped: StopReason | None = None
