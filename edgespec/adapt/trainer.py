"""Training of a network by AdamW: clipped gradients, warm-up and cosine, checkpoints, and a pace set from outside."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any, Generic, TypeVar

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from edgespec.adapt.batches import Batches
from edgespec.adapt.checkpoint import Checkpoint, Checkpoints
from edgespec.adapt.options import TrainOptions
from edgespec.adapt.pace import Pace
from edgespec.adapt.progress import Progress, TrainResult
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import BackendError, Cancelled

B = TypeVar("B")
Objective = Callable[[Any, B], mx.array]
"""(network, batch) -> the loss, a scalar that is minimized."""

_VERSION = 1  # of the state in a checkpoint, and of what follows from it
_TIMED = range(2, 10)  # steps that tell how many the time allows
_RECENT = 32  # steps whose mean loss is reported at the end


@dataclass(frozen=True, slots=True)
class _State:
    """What a checkpoint has beside arrays; `losses` are the recent ones, `first` the held-out loss before step 1."""

    key: str
    n_steps: int
    step: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    first: float | None = None


class Trainer(Generic[B]):
    """One run. A second one on the same folder, data and options goes on where the first one was stopped or killed.

    On a CPU the weights are then the same to the last bit as those of a run that was not.
    """

    def __init__(
        self,
        network: nn.Module,
        objective: Objective[B],
        batches: Batches[B],
        options: TrainOptions,
        folder: Path,
        *,
        pace: Pace | None = None,
        held_out: Batches[B] | None = None,
    ) -> None:
        """Trains what is not frozen in `network`. `folder` holds the checkpoints. Raises CacheError."""
        self._network = network
        self._objective = objective
        self._batches = batches
        self._options = options
        self._checkpoints = Checkpoints(folder)
        self._pace = pace or Pace()
        self._held_out = held_out
        self._optimizer = optim.AdamW(
            learning_rate=options.learning_rate, weight_decay=options.weight_decay, bias_correction=True
        )

    def run(self, report: Callable[[Progress], None], check: CheckCancelled) -> TrainResult:
        """Train to the end, or until the pace stops it. Its last act is a checkpoint, also after Cancelled.

        Raises CacheError where that cannot be written, InvalidRequest where its folder was removed, Cancelled, and
        BackendError.
        """
        state, stopped = self._resume(), None
        saved_s = perf_counter()
        times: list[float] = []
        gradient = nn.value_and_grad(self._network, lambda batch: self._objective(self._network, batch))
        try:
            if state.step == 0:
                state = replace(state, first=self._evaluate(check))
            while state.step < state.n_steps:
                stopped = self._pace.before_step(state.seconds, check)
                if stopped is not None:
                    break
                start_s = perf_counter()
                loss = self._advance(gradient, state)
                times.append(perf_counter() - start_s)
                losses = [*state.losses, loss][-_RECENT:]
                state = replace(state, step=state.step + 1, seconds=state.seconds + times[-1], losses=losses)
                if state.step == _TIMED.stop:
                    state = self._fit_time(state, times)
                if perf_counter() >= saved_s + self._options.checkpoint_s or state.step == _TIMED.stop:
                    self._save(state)
                    saved_s = perf_counter()
                is_epoch = state.step % len(self._batches) == 0 and state.step < state.n_steps
                held_out = self._evaluate(check) if is_epoch else None
                report(Progress(state.step, state.n_steps, loss, held_out, state.seconds))
        except Cancelled:
            if state.step:
                self._save(state)
            raise
        self._save(state)
        last = self._evaluate(check)
        losses_held_out = None if state.first is None or last is None else (state.first, last)
        loss = mean(state.losses) if state.losses else math.nan
        return TrainResult(state.step, state.n_steps, stopped, loss, losses_held_out, state.seconds)

    def _advance(self, gradient: Callable[[B], tuple[mx.array, Any]], state: _State) -> float:
        """Make one step; returns its loss."""
        options, step = self._options, state.step
        mx.random.seed(options.seed * 1_000_003 + step)
        self._optimizer.learning_rate = options.learning_rate * schedule(step, state.n_steps, options.warm_up)
        loss, gradients = gradient(self._batches.take(step))
        gradients, _ = optim.clip_grad_norm(gradients, options.max_norm)
        self._optimizer.update(self._network, gradients)
        mx.eval(loss, self._network.trainable_parameters(), self._optimizer.state)
        if not math.isfinite(found := float(loss.item())):
            raise BackendError(f"the loss of step {step + 1} is not a number.", hint="Use a lower learning rate.")
        return found

    def _evaluate(self, check: CheckCancelled) -> float | None:
        """The mean of the held-out batches."""
        if self._held_out is None:
            return None
        losses = []
        self._network.eval()
        for i in range(len(self._held_out)):
            self._pace.wait(check)
            losses.append(float(self._objective(self._network, self._held_out.take(i)).item()))
        self._network.train()
        return mean(losses)

    def _fit_time(self, state: _State, times: list[float]) -> _State:
        """`state` with as many steps as the time allows, so that the learning rate falls to 0 in it."""
        left_s = self._pace.limit_s - state.seconds
        step_s = median(times[-len(_TIMED) :])
        return (
            state
            if left_s >= step_s * (state.n_steps - state.step)
            else replace(state, n_steps=state.step + max(1, int(left_s / step_s)))
        )

    def _resume(self) -> _State:
        """The state after the last good checkpoint, whose weights the network then has; else that of a new run."""
        new = _State(self._make_key(), self._options.epochs * len(self._batches))
        checkpoint = self._checkpoints.load(new.key)
        if checkpoint is None:
            return new
        parts: dict[str, list[tuple[str, mx.array]]] = {"weights": [], "optimizer": []}
        for name, array in checkpoint.arrays.items():
            part, path = name.split(":", 1)
            parts[part].append((path, array))
        self._network.update(tree_unflatten(parts["weights"]))
        self._optimizer.state = tree_unflatten(parts["optimizer"])
        return _State(**checkpoint.state)

    def _save(self, state: _State) -> None:
        arrays = {f"weights:{path}": array for path, array in tree_flatten(self._network.trainable_parameters())}
        arrays |= {f"optimizer:{path}": array for path, array in tree_flatten(self._optimizer.state)}
        self._checkpoints.save(state.step, Checkpoint(arrays, asdict(state)))

    def _make_key(self) -> str:
        """A hash of data and options, of what is trained, and of the weights that are not."""
        options = {name: value for name, value in asdict(self._options).items() if name != "checkpoint_s"}
        digest = blake2b(json.dumps([_VERSION, self._batches.key, options]).encode(), digest_size=16)
        trained = dict(tree_flatten(self._network.trainable_parameters()))
        for path, array in tree_flatten(self._network.parameters()):
            value = "" if path in trained else array.sum().item()
            digest.update(f"{path} {array.dtype} {array.shape} {value}".encode())
        return digest.hexdigest()


def schedule(step: int, n_steps: int, warm_up: float) -> float:
    """The share of the highest learning rate for a step, from 0: a line up, then a half cosine down."""
    n_up = round(warm_up * n_steps)
    if step < n_up:
        return (step + 1) / n_up
    return 0.5 * (1 + math.cos(math.pi * (step - n_up) / max(n_steps - n_up, 1)))
