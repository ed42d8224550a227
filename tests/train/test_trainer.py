"""Training: it learns, by AdamW's rule and a loss as NumPy has it, and pauses for what is more urgent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from edgespec.backends.options import LoadOptions
from edgespec.client.local import LocalEngine
from edgespec.core.sampling import SamplingParams
from edgespec.engine.activity import Activity, activity_path, is_any_engine_working
from edgespec.engine.events import Request
from edgespec.errors import BackendError
from edgespec.models.load_config import LoadConfig
from edgespec.train.objectives import distillation, forward_kl
from edgespec.train.options import Allowance, Progress, Throttle, TrainOptions
from edgespec.train.parts import Parts
from edgespec.train.teacher import Part
from edgespec.train.trainer import Trainer, _State
from tests.gguf_models import REPOSITORY
from tests.train.runs import FREE, OPTIONS, TinyDraft, make_batches, make_trainer

SHORT = replace(OPTIONS, epochs=2)


def ignore(progress: Progress) -> None:
    """Reports to nobody."""


def test_training_lowers_the_loss_of_texts_that_it_has_not_seen(tmp_path: Path) -> None:
    network, trainer = make_trainer(tmp_path, TrainOptions(learning_rate=1e-2, epochs=12))
    held_out = make_batches(seed=1, n=6)

    def evaluate() -> float:
        network.eval()
        losses = [float(distillation(network, held_out.take(i)).item()) for i in range(len(held_out))]
        network.train()
        return float(np.mean(losses))

    frozen, before = np.array(network.layers[0].weight), evaluate()
    seen: list[Progress] = []
    result = trainer.run(seen.append)
    assert result.step == result.n_steps == len(seen) == 12 * len(make_batches()) and result.stopped is None
    assert evaluate() < 0.95 * before and result.loss == seen[-1].loss
    assert [each.step for each in seen if each.is_epoch] == [i * len(make_batches()) for i in range(1, 12)]
    assert [each.step for each in seen] == list(range(1, result.n_steps + 1))
    assert (np.array(network.layers[0].weight) == frozen).all()


def test_a_run_waits_for_an_engine(tmp_path: Path) -> None:
    lock = tmp_path / "working.lock"
    engine = Activity(lock)
    seen: list[str | int] = []

    def must_wait() -> bool:
        seen.append("asked")
        if seen[-3:] == ["asked"] * 3:
            engine.set(False)
        return is_any_engine_working(lock)

    def report(progress: Progress) -> None:
        seen.append(progress.step)
        engine.set(progress.step == 2)

    engine.set(True)
    throttle = Throttle(must_wait=must_wait, must_stop=lambda: False)
    make_trainer(tmp_path / "run", SHORT, throttle)[1].run(report)
    assert seen[:9] == ["asked", "asked", "asked", 1, "asked", 2, "asked", "asked", "asked"]
    assert seen[9:13] == [3, "asked", 4, "asked"] and seen[-1] == 14


def test_a_run_is_fitted_to_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learning rate falls to 0 within the time, also where steps become slower or faster."""
    now_s = 100.0
    monkeypatch.setattr("edgespec.train.options.monotonic", lambda: now_s)
    allowance = Allowance(1.0)
    _, trainer = make_trainer(tmp_path, OPTIONS, replace(FREE, allowance=allowance))
    n_all = OPTIONS.epochs * len(make_batches())
    assert n_all > 20
    now_s = 100.61  # reading and measuring take their part too
    state = _State(n_steps=n_all, step=10, seconds=0.61)
    assert trainer._fit_time(state).n_steps == 16
    assert trainer._fit_time(replace(state, n_steps=16, step=12)).n_steps == 19
    assert trainer._fit_time(replace(state, seconds=0.01)).n_steps == n_all
    allowance.reserve_s = 0.2  # is measured after the training, and after each epoch
    assert trainer._fit_time(state).n_steps == 10 + int(0.19 / (0.061 + 0.2 / len(make_batches())))
    now_s = 101.0
    assert trainer._fit_time(replace(state, step=12)).n_steps == 13
    result = make_trainer(tmp_path, OPTIONS, replace(FREE, allowance=Allowance(0)))[1].run(ignore)
    assert (result.step, result.stopped) == (0, "time")


def test_a_loss_that_is_not_a_number_ends_the_run(tmp_path: Path) -> None:
    def objective(network: TinyDraft, parts: Sequence[Part]) -> mx.array:
        return network(mx.array(parts[0].tokens[None])).mean() * float("nan")

    trainer = Trainer(TinyDraft(), objective, make_batches(), OPTIONS, tmp_path, FREE)
    with pytest.raises(BackendError, match="the loss of step 1 is not a number"):
        trainer.run(ignore)
    assert not list(tmp_path.iterdir())


def test_steps_are_those_of_adamw(tmp_path: Path) -> None:
    """Two steps against NumPy in double precision: clipping, warm-up, cosine, moments, decay."""

    class Dot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = mx.array([1.0, -2.0])

    class Two:
        def __len__(self) -> int:
            return 2

        def take(self, step: int) -> mx.array:
            return mx.array([[3.0, 4.0], [0.1, -0.2]][step % 2])

    network = Dot()
    options = TrainOptions(learning_rate=0.1, epochs=1, warm_up=0.5, weight_decay=0.1)
    batches = cast(Parts, Two())
    Trainer(network, lambda net, batch: (net.w * batch).sum(), batches, options, tmp_path, FREE).run(ignore)
    w, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    for t, (gradient, rate) in enumerate((([0.6, 0.8], 0.1), ([0.1, -0.2], 0.1)), start=1):
        g = np.array(gradient)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        w = w * (1 - rate * 0.1) - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    assert np.abs(np.array(network.w) - w).max() < 1e-5


def test_it_stops() -> None:
    free = replace(FREE, allowance=Allowance(60))
    assert free.before_step() is None
    free.allowance.reserve_s = 60.0
    assert free.before_step() == "time"
    assert replace(FREE, must_stop=lambda: True).before_step() == "battery"


def test_pauses_take_nothing_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, asked = 0.0, 0

    def must_wait() -> bool:
        nonlocal asked
        asked += 1
        return asked < 4

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += 1000.0

    monkeypatch.setattr("edgespec.train.options.monotonic", lambda: now_s)
    monkeypatch.setattr("edgespec.train.options.sleep", sleep)
    throttle = Throttle(Allowance(60), must_wait, must_stop=lambda: False)
    assert throttle.before_step() is None and now_s >= 2000 and throttle.allowance.left_s == 60


HOLD = """
import sys
from pathlib import Path
from edgespec.engine.activity import Activity
activity = Activity(Path(sys.argv[1]))
activity.set(True)
print("held", flush=True)
sys.stdin.readline()
"""


def test_engines_of_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "working.lock"
    assert not is_any_engine_working(path)
    command = [sys.executable, "-c", HOLD, str(path)]
    ours = Activity(path)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as child:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        ours.set(True)
        for _ in range(3):
            assert is_any_engine_working(path)
        ours.set(False)
        assert is_any_engine_working(path)
        child.kill()  # the system releases its lock
    assert not is_any_engine_working(path)
    ours.set(True)
    ours.set(False)
    assert not is_any_engine_working(path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    activity = Activity(tmp_path / "file" / "working.lock")
    activity.set(True)
    activity.set(False)
    assert not is_any_engine_working(tmp_path / "file" / "working.lock")


TOY = LoadConfig(model="tree", backend="toy", load=LoadOptions(context_size=200_000))


class Quiet:
    """A Reporter that reports nothing."""

    def notice(self, text: str) -> None: ...
    def download(self, name: str, done: int, total: int) -> None: ...
    def loading(self, name: str, fraction: float) -> None: ...


def test_an_engine_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it answers training waits; as soon as it has, training goes on, though the model stays open."""
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    assert activity_path().parent == tmp_path
    engine = LocalEngine()
    try:
        engine.open(TOY, Quiet()).result()
        assert Throttle(must_stop=lambda: False).before_step() is None
        stream = engine.stream(Request("ab", SamplingParams(0.0, logit_bias=((256, -1000.0),))))
        for n, _ in enumerate(stream):
            assert is_any_engine_working()
            if n == 20:
                break
        stream.cancel()
        assert Throttle(must_stop=lambda: False).before_step() is None
        assert not is_any_engine_working()
    finally:
        engine.close()
    assert not is_any_engine_working()


B, T, V, K = 2, 3, 40, 6


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def events(p: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """[B, T, K + 1] the probabilities of `ids` and of all others, which is 1e-6 at least."""
    top = np.take_along_axis(p, ids, -1)
    return np.concatenate([top, np.maximum(1 - top.sum(-1, keepdims=True), 1e-6)], -1)


class Case:
    """Random scores of a draft and a target."""

    def __init__(self, seed: int = 0, k: int = K) -> None:
        rng = np.random.default_rng(seed)
        self.draft, self.target = rng.standard_normal((2, B, T, V)) * 2
        self.ids = np.argsort(-self.target, axis=-1)[..., :k].astype(np.int32)
        self.log_probs = np.log(np.take_along_axis(softmax(self.target), self.ids, -1))
        self.mask = rng.integers(0, 2, (B, T)).astype(np.float32)
        self.mask[0, 0] = 1

    def arguments(self) -> tuple[Any, ...]:
        return tuple(mx.array(each) for each in (self.ids, self.log_probs.astype(np.float32), self.mask))

    def loss(self, draft: np.ndarray) -> float:
        """The mean over the mask, by NumPy."""
        p, q = events(softmax(self.target), self.ids), events(softmax(draft), self.ids)
        return float(((p * np.log(p / q)).sum(-1) * self.mask).sum() / self.mask.sum())


def test_values_and_gradients() -> None:
    case = Case()
    loss, gradient = mx.value_and_grad(forward_kl)(mx.array(case.draft.astype(np.float32)), *case.arguments())
    assert loss.item() == pytest.approx(case.loss(case.draft), abs=2e-6)
    differences = np.zeros_like(case.draft)
    for place in np.ndindex(case.draft.shape):
        up, down = case.draft.copy(), case.draft.copy()
        up[place] += 1e-5
        down[place] -= 1e-5
        differences[place] = (case.loss(up) - case.loss(down)) / 2e-5
    assert np.abs(np.array(gradient) - differences).max() < 2e-6
    assert np.abs(differences).max() > 1e-3
    assert not np.array(gradient)[case.mask == 0].any()


def test_rows_outside_of_the_mask_change_nothing() -> None:
    case, other = Case(), Case(9)
    before = forward_kl(mx.array(case.draft.astype(np.float32)), *case.arguments()).item()
    for ours, theirs in ((case.draft, other.draft), (case.ids, other.ids), (case.log_probs, other.log_probs)):
        ours[case.mask == 0] = theirs[case.mask == 0]
    assert forward_kl(mx.array(case.draft.astype(np.float32)), *case.arguments()).item() == before
    case.mask[:] = 0
    assert forward_kl(mx.array(case.draft.astype(np.float32)), *case.arguments()).item() == 0


def test_half_precision_rows_and_scores() -> None:
    """Rows are kept in half precision, where the known probabilities may exceed 1 together."""
    case = Case()
    case.target *= 8  # nearly all mass is on few tokens
    case.log_probs = np.log(np.take_along_axis(softmax(case.target), case.ids, -1)).astype(np.float16)
    arguments = case.arguments()
    loss, gradient = mx.value_and_grad(forward_kl)(mx.array(case.draft).astype(mx.float16), *arguments)
    expected = case.loss(case.draft.astype(np.float16).astype(float))
    assert loss.item() == pytest.approx(expected, rel=2e-3)
    assert np.isfinite(np.array(gradient)).all()


def test_slow_steps_are_fitted_at_the_first_checkpoint(tmp_path: Path) -> None:
    _, trainer = make_trainer(tmp_path, OPTIONS, replace(FREE, allowance=Allowance(240.0 - 70.0)))
    state = _State(n_steps=OPTIONS.epochs * len(make_batches()), step=2, seconds=70.0)
    assert trainer._fit_time(state).n_steps == 2 + 4
    assert trainer._fit_time(replace(state, step=0, seconds=0.0)) == replace(state, step=0, seconds=0.0)
