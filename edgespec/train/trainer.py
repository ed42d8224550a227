"""Training of a network by AdamW or Muon: clipped gradients, warm-up, cosine, checkpoints, a throttle from outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from edgespec.errors import BackendError, Cancelled
from edgespec.train.checkpoint import load_checkpoint, save_checkpoint
from edgespec.train.options import Progress, Throttle, TrainOptions
from edgespec.train.parts import Parts
from edgespec.train.teacher import Part

Objective = Callable[[Any, Sequence[Part]], mx.array]
"""(network, batch) -> the loss, a scalar that is minimized."""
IsInner = Callable[[str, mx.array], bool]
"""Whether a weight, by its path in the network, is a matrix between hidden states."""
_TIMED = 10  # steps that tell how many the time allows, if a checkpoint does not come before


@dataclass(frozen=True, slots=True)
class _State:
    """What a checkpoint has beside arrays."""

    n_steps: int
    step: int = 0
    seconds: float = 0.0


class Trainer:
    """One run. A second one with the same folder and options goes on where the first one was stopped or killed.

    On a CPU, and with the same texts, the trained weights are the same to the last bit as those of a run that was not
    stopped.
    """

    def __init__(
        self,
        network: nn.Module,
        objective: Objective,
        batches: Parts,
        options: TrainOptions,
        folder: Path,
        throttle: Throttle,
        is_inner: IsInner = lambda path, weight: False,
    ) -> None:
        """Trains what is not frozen in `network`. `folder` exists and holds the checkpoints.

        `is_inner` says which weights Muon trains (Jordan et al. 2024), if the options have a rate for it; all of them
        are matrices. AdamW trains the others.
        """
        self._network = network
        self._objective = objective
        self._batches = batches
        self._options = options
        self._folder = folder
        self._throttle = throttle
        muon = optim.Muon(options.muon_rate, weight_decay=0.0)
        adamw = optim.AdamW(options.learning_rate, weight_decay=options.weight_decay, bias_correction=True)
        self._optimizer = optim.MultiOptimizer([muon, adamw], [is_inner]) if options.muon_rate else adamw
        self._rates = [(adamw, options.learning_rate), (muon, options.muon_rate)]

    def run(self, report: Callable[[Progress], None]) -> Progress:
        """Train to the end, or until the throttle stops it. Its last act is a checkpoint, also after Cancelled.

        Raises CacheError if that cannot be written, InvalidRequest if its folder was removed, Cancelled, and
        BackendError.
        """
        state, loss, stopped = self._resume(), math.nan, None
        saved_s = perf_counter()
        gradient = nn.value_and_grad(self._network, lambda batch: self._objective(self._network, batch))
        try:
            while state.step < state.n_steps:
                stopped = self._throttle.before_step()
                if stopped is not None:
                    break
                start_s = perf_counter()
                loss = self._advance(gradient, state)
                state = replace(state, step=state.step + 1, seconds=state.seconds + perf_counter() - start_s)
                if perf_counter() >= saved_s + self._options.checkpoint_s or state.step == _TIMED:
                    state = self._fit_time(state)
                    self._save(state)
                    saved_s = perf_counter()
                is_epoch = state.step % len(self._batches) == 0 and state.step < state.n_steps
                report(Progress(state.step, state.n_steps, loss, state.seconds, is_epoch))
        except Cancelled:
            if state.step:
                self._save(state)
            raise
        self._save(state)
        return Progress(state.step, state.n_steps, loss, state.seconds, stopped=stopped)

    def _advance(self, gradient: Callable[[Sequence[Part]], tuple[mx.array, Any]], state: _State) -> float:
        """Make one step; returns its loss."""
        options, step = self._options, state.step
        mx.random.seed(options.seed * 1_000_003 + step)
        share = schedule(step, state.n_steps, options.warm_up)
        for optimizer, rate in self._rates:
            optimizer.learning_rate = rate * share
        loss, gradients = gradient(self._batches.take(step))
        gradients, _ = optim.clip_grad_norm(gradients, options.max_norm)
        self._optimizer.update(self._network, gradients)
        mx.eval(loss, self._network.trainable_parameters(), self._optimizer.state)
        if not math.isfinite(found := float(loss.item())):
            raise BackendError(f"the loss of step {step + 1} is not a number.", hint="Use a lower learning rate.")
        return found

    def _fit_time(self, state: _State) -> _State:
        """`state` with as many steps as the time allows, so that the learning rate falls to 0 in it."""
        n_all, allowance = self._options.epochs * len(self._batches), self._throttle.allowance
        if not state.step or allowance.limit_s == math.inf:
            return replace(state, n_steps=n_all)
        # After each epoch the network is measured, which takes as long as what follows the training.
        step_s = state.seconds / state.step + allowance.reserve_s / len(self._batches)
        return replace(state, n_steps=min(n_all, state.step + max(1, int(allowance.left_s / step_s))))

    def _resume(self) -> _State:
        """The state after the last good checkpoint, whose weights the network then has; else that of a new run."""
        checkpoint = load_checkpoint(self._folder, self._options)
        if checkpoint is None:
            return _State(self._options.epochs * len(self._batches))
        arrays, state = checkpoint
        parts = tree_unflatten(list(arrays.items()))
        self._network.update(parts["weights"])
        self._optimizer.state = parts["optimizer"]
        return _State(**state)

    def _save(self, state: _State) -> None:
        trained = {"weights": self._network.trainable_parameters(), "optimizer": self._optimizer.state}
        save_checkpoint(self._folder, dict(tree_flatten(trained)), asdict(state), self._options)


def schedule(step: int, n_steps: int, warm_up: float) -> float:
    """The share of the highest learning rate for a step, from 0: a line up, then a half cosine down."""
    n_up = round(warm_up * n_steps)
    if step < n_up:
        return (step + 1) / n_up
    return 0.5 * (1 + math.cos(math.pi * (step - n_up) / max(n_steps - n_up, 1)))
