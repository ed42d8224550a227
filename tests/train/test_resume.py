"""However a run ends, the next one goes on from its last checkpoint, with the same bits."""

from __future__ import annotations

import re
import resource
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from edgespec.errors import CacheError, Cancelled, InvalidRequest
from edgespec.train.objectives import distillation
from edgespec.train.options import Progress, Throttle
from edgespec.train.run_folder import open_run
from edgespec.train.student import Student
from edgespec.train.trainer import Trainer
from tests.gguf_models import DRAFT, REPOSITORY
from tests.train.runs import FREE, OPTIONS, cancel_at, digest_weights, make_batches, make_trainer, train

SHORT = replace(OPTIONS, epochs=2)


def ignore(progress: Progress) -> None:
    """Reports to nobody."""


def train_on(folder: Path) -> tuple[list[int], str]:
    """The steps that are made, and the weights after them."""
    steps: list[int] = []
    return steps, train(folder, lambda progress: steps.append(progress.step))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run with OPTIONS that nothing has interrupted."""
    return train(tmp_path_factory.mktemp("whole"), ignore)


def test_kill_and_resume(tmp_path: Path, expected: str) -> None:
    """kill -9 between steps and while a checkpoint is being written, twice; then the run is finished."""
    reached = 0
    for kill_after in (2, 13):
        command = [sys.executable, "-m", "tests.train.runs", str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as child:
            assert child.stdout is not None
            steps = [int(re.findall(r"\d+", child.stdout.readline())[0])]
            while steps[-1] < kill_after:
                steps.append(int(re.findall(r"\d+", child.stdout.readline())[0]))
            child.kill()
        assert steps[0] > reached  # a step is reported after its checkpoint
        reached = kill_after
    steps, weights = train_on(tmp_path)
    assert len(steps) <= 21 - reached and steps == list(range(22 - len(steps), 22)) and weights == expected
    assert train_on(tmp_path) == ([], expected), "a finished run is not repeated"


@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: b"", lambda data: b"\xff" * 100])
def test_after_a_damaged_checkpoint_a_run_begins_anew(tmp_path: Path, expected: str, damage: object) -> None:
    with pytest.raises(Cancelled):
        make_trainer(tmp_path, throttle=cancel_at(4))[1].run(ignore)
    file = tmp_path / "checkpoint"
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    (tmp_path / ".checkpoint.1234abcd").write_bytes(b"what a killed process leaves")
    steps, weights = train_on(tmp_path)
    assert steps[0] == 1 and weights == expected
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_full_disk(tmp_path: Path, expected: str) -> None:
    """A limit on the size of files makes the write fail midway, as a full disk would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def report(progress: Progress) -> None:
        if progress.step == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    try:
        with pytest.raises(CacheError) as caught:
            train(tmp_path, report)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.message == f"the training in {tmp_path} cannot be saved: File too large."
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    steps, weights = train_on(tmp_path)
    assert steps[0] == 7 and weights == expected


def test_a_run_whose_folder_is_removed_ends(tmp_path: Path) -> None:
    """As `memory clear` does: nothing is kept of what it has learned."""
    folder = tmp_path / "run"

    def remove(progress: Progress) -> None:
        if progress.step == 2:
            shutil.rmtree(folder)

    with pytest.raises(InvalidRequest, match="removed while it ran"):
        make_trainer(folder, replace(SHORT, checkpoint_s=3600.0))[1].run(remove)
    assert not folder.exists()


@pytest.mark.parametrize("n", [1, 2, 7, 14])
def test_cancelling_anywhere(tmp_path: Path, n: int) -> None:
    """Weights and state belong together."""
    whole, trainer = make_trainer(tmp_path / "whole", SHORT)
    assert trainer.run(ignore).step == 14 == 2 * len(make_batches())
    with pytest.raises(Cancelled):
        make_trainer(tmp_path / "parts", SHORT, cancel_at(n))[1].run(ignore)
    network, trainer = make_trainer(tmp_path / "parts", SHORT)
    trainer.run(ignore)
    assert digest_weights(network) == digest_weights(whole)


@pytest.mark.parametrize("change", [{"start": "version 2"}, {"learning_rate": 1e-3}])
def test_a_checkpoint_of_other_options_is_not_used(tmp_path: Path, change: dict[str, Any]) -> None:
    """Such as one of a run that started from another version."""
    make_trainer(tmp_path, SHORT)[1].run(ignore)
    seen: list[int] = []
    make_trainer(tmp_path, replace(SHORT, **change))[1].run(lambda progress: seen.append(progress.step))
    assert seen[0] == 1


def test_the_throttle_stops_and_resumes(tmp_path: Path, expected: str) -> None:
    n_asked = 0

    def must_stop() -> bool:
        nonlocal n_asked
        n_asked += 1
        return n_asked > 5

    _, trainer = make_trainer(tmp_path, OPTIONS, Throttle(must_wait=lambda: False, must_stop=must_stop))
    result = trainer.run(ignore)
    assert (result.step, result.n_steps, result.stopped) == (5, 21, "battery")
    assert train_on(tmp_path)[1] == expected


def test_a_draft_model_goes_on(tmp_path: Path) -> None:
    """The packaged draft with LoRA, whose matrices are drawn: those of the checkpoint count."""

    def run(folder: Path, seed: int, throttle: Throttle = FREE) -> str:
        mx.random.seed(seed)
        student = Student.open(DRAFT)
        student.train_lora(2)
        folder.mkdir(exist_ok=True)
        Trainer(student.network, distillation, make_batches(n=4), SHORT, folder, throttle).run(ignore)
        return digest_weights(student.network)

    whole = run(tmp_path / "whole", 1)
    with pytest.raises(Cancelled):
        run(tmp_path / "parts", 1, cancel_at(2))
    assert run(tmp_path / "parts", 2) == whole
    assert run(tmp_path / "other", 2) != whole


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "adapted" / "pair" / "training"


def test_a_run_that_has_a_checkpoint_goes_on(folder: Path) -> None:
    with pytest.raises(Cancelled), open_run(folder):
        (folder / "checkpoint").touch()
        raise Cancelled
    with open_run(folder):
        assert (folder / "checkpoint").exists()
        assert stat.S_IMODE((folder / "lock").stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_a_run_that_kept_nothing_is_forgotten(folder: Path) -> None:
    with pytest.raises(InvalidRequest), open_run(folder):
        raise InvalidRequest("too few.", hint="Chat.")
    assert not folder.exists()


def test_one_process_runs_it(folder: Path) -> None:
    with open_run(folder):
        (folder / "checkpoint").touch()
        with pytest.raises(InvalidRequest, match="already"), open_run(folder):
            pass
        assert (folder / "checkpoint").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "adapted").touch()
    with pytest.raises(CacheError, match="cannot be written"), open_run(tmp_path / "adapted" / "pair" / "run"):
        pass
