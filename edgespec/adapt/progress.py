"""What a training tells while it runs, and at its end. Nothing here needs MLX."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.adapt.pace import StopReason


@dataclass(frozen=True, slots=True)
class Progress:
    """After a step.

    loss      of its batch
    held_out  the mean of the held-out batches; None where it was not computed after this step
    seconds   of training so far, those before a resume included, without pauses
    """

    step: int
    n_steps: int
    loss: float
    held_out: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class TrainResult:
    """A run that has ended; the network has the trained weights.

    stopped   why it ended before its last step; None where it did not
    loss      the mean of the last steps
    held_out  the mean of the held-out batches before the first step and now; None without such batches
    """

    step: int
    n_steps: int
    stopped: StopReason | None
    loss: float
    held_out: tuple[float, float] | None
    seconds: float
