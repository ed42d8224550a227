"""Training: it learns, by AdamW's rule, and pauses for what is more urgent."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from edgespec.adapt.options import LOSS_NAMES, LossName, Progress, Throttle, TrainOptions
from edgespec.adapt.teacher import Batch
from edgespec.adapt.trainer import Trainer, distillation, schedule
from edgespec.errors import BackendError, InvalidRequest
from edgespec.service.learn import Activity, is_any_engine_working
from tests.adapt.runs import FREE, OPTIONS, TinyDraft, make_batches, make_trainer

SHORT = replace(OPTIONS, epochs=2)


def idle() -> None:
    """Never cancels."""


def ignore(progress: Progress) -> None:
    """Reports to nobody."""


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_training_lowers_the_loss_of_texts_that_it_has_not_seen(name: LossName, tmp_path: Path) -> None:
    options = TrainOptions(loss=name, learning_rate=1e-2, epochs=12)
    network, trainer = make_trainer(tmp_path, options)
    held_out, objective = make_batches(seed=1, n=6), distillation(name)

    def evaluate() -> float:
        network.eval()
        losses = [float(objective(network, held_out.take(i)).item()) for i in range(len(held_out))]
        network.train()
        return float(np.mean(losses))

    frozen, before = np.array(network.layers[0].weight), evaluate()
    seen: list[Progress] = []
    result = trainer.run(seen.append, idle)
    assert result.step == result.n_steps == len(seen) == 12 * len(make_batches()) and result.stopped is None
    assert evaluate() < 0.95 * before and result.loss == seen[-1].loss
    assert [each.step for each in seen if each.is_epoch] == [i * len(make_batches()) for i in range(1, 12)]
    assert [each.step for each in seen] == list(range(1, result.n_steps + 1))
    assert (np.array(network.layers[0].weight) == frozen).all()
    if name == "tv":  # 1 - acceptance
        network.eval()
        losses = []
        for i in range(len(held_out)):
            batch = held_out.take(i)
            q = np.array(mx.softmax(network(mx.array(batch.tokens)), axis=-1))
            p, q = np.exp(batch.log_probs), np.take_along_axis(q, batch.ids, -1)
            accepted = np.minimum(p, q).sum(-1) + np.minimum(1 - p.sum(-1), 1 - q.sum(-1))
            losses.append(1 - (accepted * batch.mask).sum() / batch.mask.sum())
        assert evaluate() == pytest.approx(np.mean(losses), abs=1e-5)


def test_a_run_waits_for_an_engine(tmp_path: Path) -> None:
    lock = tmp_path / "working.lock"
    engine = Activity(lock)
    seen: list[str | int] = []

    def check() -> None:
        seen.append("asked")
        if seen[-3:] == ["asked"] * 3:
            engine.set(False)

    def report(progress: Progress) -> None:
        seen.append(progress.step)
        engine.set(progress.step == 2)

    engine.set(True)
    throttle = Throttle(must_wait=partial(is_any_engine_working, lock), must_stop=lambda: False)
    make_trainer(tmp_path / "run", SHORT, throttle)[1].run(report, check)
    assert seen[:9] == ["asked", "asked", "asked", 1, "asked", 2, "asked", "asked", "asked"]
    assert seen[9:13] == [3, "asked", 4, "asked"] and seen[-1] == 14
    engine.close()


def test_a_run_is_fitted_to_its_time(tmp_path: Path) -> None:
    throttle = replace(FREE, limit_s=0.5)
    result = make_trainer(tmp_path, replace(OPTIONS, epochs=1000), throttle)[1].run(ignore, idle)
    # A machine so slow that the time ends within the steps that are timed first has fitted nothing.
    assert result.stopped == "time" or result.step == result.n_steps
    assert 10 < result.n_steps < 7000 or result.step <= 10
    result = make_trainer(tmp_path / "none", OPTIONS, replace(FREE, limit_s=0))[1].run(ignore, idle)
    assert (result.step, result.stopped) == (0, "time")


def test_a_loss_that_is_not_a_number_ends_the_run(tmp_path: Path) -> None:
    def objective(network: TinyDraft, batch: Batch) -> mx.array:
        return network(mx.array(batch.tokens)).mean() * float("nan")

    trainer = Trainer(TinyDraft(), objective, make_batches(), OPTIONS, tmp_path, FREE)
    with pytest.raises(BackendError, match="the loss of step 1 is not a number"):
        trainer.run(ignore, idle)
    assert not list(tmp_path.iterdir())


def test_steps_are_those_of_adamw(tmp_path: Path) -> None:
    """Two steps against NumPy in double precision: clipping, warm-up, cosine, moments, decay."""

    class Dot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = mx.array([1.0, -2.0])

    class Two:
        key = "two"

        def __len__(self) -> int:
            return 2

        def take(self, step: int) -> mx.array:
            return mx.array([[3.0, 4.0], [0.1, -0.2]][step % 2])

    network = Dot()
    options = TrainOptions(learning_rate=0.1, epochs=1, warm_up=0.5, weight_decay=0.1)
    Trainer(network, lambda net, batch: (net.w * batch).sum(), Two(), options, tmp_path, FREE).run(ignore, idle)
    w, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    for t, (gradient, rate) in enumerate((([0.6, 0.8], 0.1), ([0.1, -0.2], 0.1)), start=1):
        g = np.array(gradient)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        w = w * (1 - rate * 0.1) - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    assert np.abs(np.array(network.w) - w).max() < 1e-5


def test_the_schedule() -> None:
    rates = [schedule(step, 100, 0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1 and rates[55] == pytest.approx(0.5) and 0 < rates[99] < 1e-3
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert schedule(0, 1, 0.05) == 1 and schedule(0, 1, 1.0) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rate": 0.0}, "the learning rate must be 1e-08 to 1, not 0."),
        ({"learning_rate": float("nan")}, "not nan."),
        ({"epochs": 0}, "the number of epochs must be 1 to 1000, not 0."),
        ({"seed": -1}, "the seed"),
    ],
)
def test_options_out_of_range(values: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        TrainOptions(**values)  # type: ignore[arg-type]
