"""The loss of a worker: one sentence that names it, the text so far, and an engine that opens the model again."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import sleep

import pytest

from edgespec.backends.options import LoadOptions
from edgespec.client.death import Death
from edgespec.client.process import EngineProcess
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import Finished, Request
from edgespec.errors import BackendError
from edgespec.models.load_config import LoadConfig
from edgespec.text.stream import Piece
from tests.gguf_models import REPOSITORY
from tests.reporter import Heard
from tests.workers import WorkerProcess, free_port, make_large, started_worker

ENDLESS = SamplingParams(temperature=0.0, logit_bias=((0, -1000.0),))  # 0 ends a text


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"EDGESPEC_{name}_DIR", str(tmp_path / name.lower()))


@pytest.fixture
def deaths() -> list[Death]:
    return []


@pytest.fixture
def engine(deaths: list[Death]) -> Iterator[EngineProcess]:
    made = EngineProcess("Open it again.", on_death=deaths.append)
    yield made
    made.close()


def config(*workers: str, model: str | None = None, draft: str = "ngram") -> LoadConfig:
    options = LoadOptions(context_size=2048, threads=1, workers=workers, gpu_layers=4)
    return LoadConfig(model=model, draft=draft, draft_max=3, load=options)


def test_a_worker_that_is_killed_in_an_answer_is_said_and_the_next_answer_works(
    engine: EngineProcess, deaths: list[Death]
) -> None:
    with started_worker() as stays:
        lost = WorkerProcess(free_port())
        heard = Heard()
        engine.open(config(stays.address, lost.address), heard).result()
        assert heard.notices[0].startswith(
            f"2 layers here, 2 on {stays.address}, 2 on {lost.address}; the network adds "
        )
        pieces = []
        with pytest.raises(BackendError) as told:
            for event in engine.stream(Request("def fib(n):", ENDLESS, 1900)):
                if isinstance(event, Piece):
                    pieces.append(event.text)
                    if len(pieces) == 3:
                        lost.end(signal.SIGKILL)
        both = f"{stays.address}, {lost.address}"
        assert told.value.message == f"one of the workers {both} does not answer any more."
        assert told.value.hint.startswith("Start it again there (edgespec worker)")
        assert told.value.hint.endswith("Open it again.")
        assert len(pieces) >= 3 and [death.cause for death in deaths] == ["worker"]
        with pytest.raises(BackendError, match=f"the worker {lost.address} cannot be reached: "):
            engine.open(config(stays.address, lost.address), Heard()).result()
        again = WorkerProcess(lost.port)
        try:
            engine.open(config(stays.address, lost.address), Heard()).result()
            ends = [e for e in engine.stream(Request("def fib(n):", ENDLESS, 30)) if isinstance(e, Finished)]
            assert len(ends[0].tokens) == 30
        finally:
            engine.close()
            again.end()


def test_a_worker_that_is_killed_while_weights_are_sent(engine: EngineProcess, tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    make_large(path, layers=8)
    worker = WorkerProcess(free_port())

    class Killer(Heard):
        def loading(self, name: str, fraction: float) -> None:
            if 0 < fraction < 1:
                worker.end(signal.SIGKILL)

    with pytest.raises(BackendError, match=f"the worker {worker.address} does not answer any more"):
        engine.open(config(worker.address, model=str(path), draft="ngram"), Killer()).result()
    assert worker.end()[0] != 0


def test_a_worker_that_takes_long_is_waited_for() -> None:
    engine = EngineProcess(max_silence_s=2.0)
    try:
        with started_worker() as worker:
            engine.open(config(worker.address), Heard()).result()
            n_pieces = 0
            for event in engine.stream(Request("def fib(n):", ENDLESS, 800)):
                if isinstance(event, Piece):
                    n_pieces += 1
                    if n_pieces == 3:
                        worker.send(signal.SIGSTOP)
                        sleep(3)
                        worker.send(signal.SIGCONT)
            assert isinstance(event, Finished) and len(event.tokens) == 800
    finally:
        engine.close()


def test_a_command_that_decodes_itself_ends_with_the_sentence() -> None:
    with started_worker() as worker:
        command = [
            sys.executable,
            "-m",
            "edgespec",
            "run",
            "def fib(n):",
            "--workers",
            worker.address,
            "--threads",
            "1",
        ]
        options = ["--max-tokens", "1900", "--temperature", "0", "--logit-bias", "0=-1000", "--no-memory"]
        with subprocess.Popen(
            [*command, *options], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as running:
            assert running.stdout is not None and running.stderr is not None
            text = running.stdout.read(40)
            worker.end(signal.SIGKILL)
            text += running.stdout.read()
            told = running.stderr.read()
        assert running.returncode == BackendError.exit_code and len(text) >= 40
        assert f"error: The worker {worker.address} does not answer any more.\nhint: Start it again" in told
