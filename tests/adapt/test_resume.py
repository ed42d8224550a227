"""However a run ends, the next one goes on from its last good checkpoint, with the same bits."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from edgespec.adapt.options import Progress, Throttle
from edgespec.adapt.student import Student
from edgespec.adapt.trainer import Trainer, distillation
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import Cancelled, InvalidRequest
from tests.adapt.runs import FREE, OPTIONS, digest_weights, make_batches, make_trainer, train
from tests.models import DRAFT, REPOSITORY

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


def test_a_run_whose_folder_is_removed_ends(tmp_path: Path) -> None:
    """As `adapt data clear` does: nothing is kept of what it has learned."""
    folder = tmp_path / "run"

    def remove(progress: Progress) -> None:
        if progress.step == 2:
            shutil.rmtree(folder)

    with pytest.raises(InvalidRequest, match="removed while it ran"):
        make_trainer(folder, replace(SHORT, checkpoint_s=3600.0))[1].run(remove, idle)
    assert not folder.exists()


def test_cancelling_anywhere(tmp_path: Path) -> None:
    """Weights and state belong together."""

    def run(folder: Path, n: int | None) -> tuple[int, str]:
        calls = 0

        def check() -> None:
            nonlocal calls
            calls += 1
            if calls == n:
                raise Cancelled

        network, trainer = make_trainer(folder, SHORT)
        trainer.run(ignore, check)
        return calls, digest_weights(network)

    n_calls, whole = run(tmp_path / "whole", None)
    assert n_calls == 2 * len(make_batches())
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


def test_the_throttle_stops_and_resumes(tmp_path: Path, expected: str) -> None:
    n_asked = 0

    def must_stop() -> bool:
        nonlocal n_asked
        n_asked += 1
        return n_asked > 5

    _, trainer = make_trainer(tmp_path, OPTIONS, Throttle(must_wait=lambda: False, must_stop=must_stop))
    result = trainer.run(ignore, idle)
    assert (result.step, result.n_steps, result.stopped) == (5, 21, "battery")
    network, trainer = make_trainer(tmp_path, OPTIONS, FREE)
    assert trainer.run(ignore, idle).step == 21
    assert digest_weights(network) == expected


def test_a_draft_model_goes_on(tmp_path: Path) -> None:
    """The packaged draft with LoRA, whose matrices are drawn: those of the checkpoint count."""

    def run(folder: Path, seed: int, check: CheckCancelled) -> str:
        mx.random.seed(seed)
        student = Student.open(DRAFT)
        student.train_lora(2)
        batches = make_batches(n=4)
        folder.mkdir(exist_ok=True)
        Trainer(student.network, distillation("tv"), batches, OPTIONS, folder, FREE).run(ignore, check)
        return digest_weights(student.network)

    n_checks = 0

    def stop() -> None:
        nonlocal n_checks
        n_checks += 1
        if n_checks == 3:
            raise Cancelled

    whole = run(tmp_path / "whole", 1, idle)
    with pytest.raises(Cancelled):
        run(tmp_path / "parts", 1, stop)
    assert run(tmp_path / "parts", 2, idle) == whole
    assert run(tmp_path / "other", 2, idle) != whole
