"""Training: it learns; however a run ends, the next one goes on with the same bits."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from edgespec.adapt.batches import Batch
from edgespec.adapt.options import LOSS_NAMES, TrainOptions
from edgespec.adapt.pace import Pace
from edgespec.adapt.trainer import Progress, Trainer, schedule
from edgespec.errors import BackendError, Cancelled, InvalidRequest
from tests.adapt.runs import FREE, OPTIONS, TinyDraft, digest_weights, make_batches, make_trainer, train
from tests.models import REPOSITORY

SHORT = replace(OPTIONS, epochs=2)


def idle() -> None:
    """Never cancels."""


def ignore(progress: Progress) -> None:
    """Reports to nobody."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run with OPTIONS that nothing has interrupted."""
    return train(tmp_path_factory.mktemp("whole"), ignore)


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.adapt.runs", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_training_lowers_the_loss_of_texts_that_it_has_not_seen(name: str, tmp_path: Path) -> None:
    options = TrainOptions(loss=name, learning_rate=1e-2, epochs=12)  # type: ignore[arg-type]
    network, trainer = make_trainer(tmp_path, options, held_out=make_batches(seed=1, n=6))
    frozen = np.array(network.layers[0].weight)
    seen: list[Progress] = []
    result = trainer.run(seen.append, idle)
    assert result.step == result.n_steps == len(seen) == 12 * len(make_batches()) and result.stopped is None
    assert result.held_out is not None and result.held_out[1] < 0.95 * result.held_out[0]
    assert sum(each.held_out is not None for each in seen) == 11  # after each epoch but the last
    assert [each.step for each in seen] == list(range(1, result.n_steps + 1))
    assert (np.array(network.layers[0].weight) == frozen).all()
    if name == "tv":  # the held-out loss is 1 - acceptance, and is what a forward gives
        batches = make_batches(seed=1, n=6)
        network.eval()
        losses = []
        for i in range(len(batches)):
            batch = batches.take(i)
            q = np.array(mx.softmax(network(mx.array(batch.tokens)), axis=-1))
            p, q = np.exp(batch.log_probs), np.take_along_axis(q, batch.ids, -1)
            accepted = np.minimum(p, q).sum(-1) + np.minimum(1 - p.sum(-1), 1 - q.sum(-1))
            losses.append(1 - (accepted * batch.mask).sum() / batch.mask.sum())
        assert result.held_out[1] == pytest.approx(np.mean(losses), abs=1e-5)


def test_kill_and_resume(tmp_path: Path, expected: str) -> None:
    """kill -9 between steps and while a checkpoint is being written, three times; then the run is finished."""
    reached = 0
    for kill_after in (2, 7, 13):
        child = start(tmp_path)
        assert child.stdout is not None
        first = None
        for line in child.stdout:
            step = int(line.removeprefix("step "))
            first = first or step
            if step >= kill_after:
                break
        child.kill()
        child.communicate()
        assert first is not None and first > reached  # a step is reported after its checkpoint
        reached = kill_after
    last = start(tmp_path)
    out, err = last.communicate()
    assert last.returncode == 0, err
    steps = [int(step) for step in re.findall(r"step (\d+)", out)]
    assert len(steps) <= 21 - reached and steps == list(range(22 - len(steps), 22))
    assert out.split()[-1] == expected
    again = start(tmp_path).communicate()[0]  # a finished run is not repeated
    assert again == f"weights {expected}\n"


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, expected: str) -> None:
    def stop_at(step: int) -> None:
        _, trainer = make_trainer(tmp_path)
        seen: list[int] = []

        def check() -> None:
            if seen and seen[-1] >= step:
                raise Cancelled

        with pytest.raises(Cancelled):
            trainer.run(lambda progress: seen.append(progress.step), check)

    def run_on() -> tuple[int, str]:
        network, trainer = make_trainer(tmp_path)
        seen: list[int] = []
        trainer.run(lambda progress: seen.append(progress.step), idle)
        return seen[0], digest_weights(network)

    stop_at(9)
    newest = sorted(tmp_path.iterdir())[-1]
    assert len(list(tmp_path.iterdir())) == 2
    data = newest.read_bytes()
    damages = [data[:-1], data[: len(data) // 2], b"", data + b"\0", *(flip(data, i) for i in (0, 9, 300, -200, -1))]
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for damaged in damages:
        for path in tmp_path.iterdir():
            path.unlink()
        for path, content in before.items():
            path.write_bytes(damaged if path == newest else content)
        (tmp_path / f".{newest.name}.1234abcd").write_bytes(data[:100])  # what a killed process leaves
        assert run_on() == (9, expected)
        assert len(list(tmp_path.iterdir())) == 2
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:1000])
    assert run_on() == (1, expected)


def flip(data: bytes, place: int) -> bytes:
    changed = bytearray(data)
    changed[place] ^= 1
    return bytes(changed)


FULL_DISK = """
import resource
from edgespec.errors import CacheError
from tests.adapt.runs import *
def report(progress):
    if progress.step == 6:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
try:
    train(Path(sys.argv[1]), report)
except CacheError as error:
    sys.exit(error.message + "|" + error.hint)
"""


def test_a_full_disk(tmp_path: Path, expected: str) -> None:
    """A limit on the size of files makes the write fail midway, as a full disk would."""
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert child.returncode == 1
    message, hint = child.stderr.strip().split("|")
    assert message == f"the training in {tmp_path} cannot be saved: File too large."
    assert hint.startswith("Free some space")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0000000005.checkpoint", "0000000006.checkpoint"]
    seen: list[int] = []
    assert train(tmp_path, lambda progress: seen.append(progress.step)) == expected
    assert seen[0] == 7


def test_cancelling_anywhere(tmp_path: Path) -> None:
    """Also while held-out texts are read: weights and state belong together."""

    def run(folder: Path, n: int | None) -> tuple[int, str]:
        calls = 0

        def check() -> None:
            nonlocal calls
            calls += 1
            if calls == n:
                raise Cancelled

        network, trainer = make_trainer(folder, SHORT, held_out=make_batches(seed=1, n=6))
        trainer.run(ignore, check)
        return calls, digest_weights(network)

    n_calls, whole = run(tmp_path / "whole", None)
    assert n_calls > 2 * len(make_batches())
    for n in (1, 2, *range(3, n_calls, 3), n_calls):
        with pytest.raises(Cancelled):
            run(tmp_path / str(n), n)
        assert run(tmp_path / str(n), None)[1] == whole


def test_checkpoints_of_another_run_are_not_used(tmp_path: Path) -> None:
    make_trainer(tmp_path, SHORT)[1].run(ignore, idle)
    changed = replace(SHORT, learning_rate=1e-3)
    seen: list[int] = []
    network, trainer = make_trainer(tmp_path, changed)
    trainer.run(lambda progress: seen.append(progress.step), idle)
    assert seen[0] == 1
    fresh, trainer = make_trainer(tmp_path / "fresh", changed)
    trainer.run(ignore, idle)
    assert digest_weights(network) == digest_weights(fresh)
    assert sorted(path.name for path in tmp_path.glob("*.checkpoint"))[-1] == "0000000014.checkpoint"


def test_the_pace_stops_and_resumes(tmp_path: Path, expected: str) -> None:
    n_asked = 0

    def must_stop() -> bool:
        nonlocal n_asked
        n_asked += 1
        return n_asked > 5

    _, trainer = make_trainer(tmp_path, OPTIONS, Pace(must_wait=lambda: False, must_stop=must_stop))
    result = trainer.run(ignore, idle)
    assert (result.step, result.n_steps, result.stopped) == (5, 21, "battery")
    network, trainer = make_trainer(tmp_path, OPTIONS, FREE)
    assert trainer.run(ignore, idle).step == 21
    assert digest_weights(network) == expected


def test_a_run_is_fitted_to_its_time(tmp_path: Path) -> None:
    pace = replace(FREE, limit_s=0.5)
    result = make_trainer(tmp_path, replace(OPTIONS, epochs=1000), pace)[1].run(ignore, idle)
    assert 10 < result.n_steps < 7000 and result.step <= result.n_steps
    assert result.stopped == "time" or result.step == result.n_steps
    result = make_trainer(tmp_path / "none", OPTIONS, replace(FREE, limit_s=0))[1].run(ignore, idle)
    assert (result.step, result.stopped) == (0, "time")


def test_a_loss_that_is_not_a_number_ends_the_run(tmp_path: Path) -> None:
    def objective(network: TinyDraft, batch: Batch) -> mx.array:
        return network(mx.array(batch.tokens)).mean() * float("nan")

    trainer = Trainer(TinyDraft(), objective, make_batches(), OPTIONS, tmp_path, pace=FREE)
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
    Trainer(network, lambda net, batch: (net.w * batch).sum(), Two(), options, tmp_path, pace=FREE).run(ignore, idle)
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
