"""Learning while an engine runs: real trainings of a tiny draft, which the engine then uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest

from edgespec.backends.options import LoadOptions
from edgespec.cli.adapt import adapt_command
from edgespec.client.client import require_model
from edgespec.client.local import LocalEngine
from edgespec.client.process import EngineProcess
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import Finished, MemoryUse, Notice, Request
from edgespec.folders import adapted_folder, memory_folder
from edgespec.models.load_config import LearnOptions, LoadConfig, MemoryOptions
from edgespec.models.versions import AdaptedDrafts, AdaptedPair, allow_training
from edgespec.train.learn import _make_command
from edgespec.units import GIB
from tests.cli.test_adapt import keep_texts
from tests.gguf_models import TARGET, llama
from tests.reporter import Heard

PATIENCE_S = 200  # a training has a low priority
N_TOKENS = 30
TRAINING = ("--epochs", "1", "--learning-rate", "0.01", "--on-battery")
SOON = LearnOptions(new_tokens=4000, idle_s=0.1, training=TRAINING)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadConfig:
    """A draft with random weights for the embedded target, and 40 conversations in the memory."""
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"EDGESPEC_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.setattr("edgespec.train.learn.SHARE", 1.0)
    llama(tmp_path / "draft.gguf", layers=1, width=32)
    keep_texts(tmp_path / "data")
    options = LoadOptions(threads=1, context_size=256, exact=True)
    draft, memory = str(tmp_path / "draft.gguf"), MemoryOptions(memory_folder())
    return LoadConfig(draft=draft, draft_max=3, load=options, memory=memory, adapted=adapted_folder(), learn=SOON)


@pytest.fixture
def pair(config: LoadConfig) -> AdaptedPair:
    return AdaptedDrafts(adapted_folder()).pair(TARGET, Path(config.draft))


def answer(engine: LocalEngine) -> tuple[tuple[int, ...], list[str]]:
    """An answer that the memory keeps, and the notices in it."""
    request = Request("def f(x):", SamplingParams(temperature=0.0), N_TOKENS, memory=MemoryUse())
    events = list(engine.stream(request))
    assert isinstance(events[-1], Finished)
    return events[-1].tokens, [event.text for event in events if isinstance(event, Notice)]


def wait(holds: Callable[[], object]) -> None:
    end = monotonic() + PATIENCE_S
    while not holds():
        assert monotonic() < end, "what was waited for did not happen"
        sleep(0.05)


def trainings() -> list[psutil.Process]:
    """The trainings that this process, or its engine processes, have started."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "train" in child.cmdline():
                found.append(child)
    return found


def test_the_draft_learns_while_its_engine_is_idle(config: LoadConfig, pair: AdaptedPair) -> None:
    allow_training(adapted_folder())
    heard = Heard()
    with closing(LocalEngine()) as engine:
        engine.open(replace(config, draft="none", draft_max=None), heard).result()
        assert heard.notices[-1].startswith("Nothing is learned, because")
        plain, _ = answer(engine)
    with closing(LocalEngine()) as engine:
        engine.open(config, heard).result()
        assert len(heard.notices) == 1
        wait(trainings)
        assert answer(engine)[0] == plain, "answers go on meanwhile"
        wait(lambda: pair.active_number() == 1 and not trainings())
        sleep(1.05)  # the engine looks for versions once a second
        tokens, notices = answer(engine)
        assert tokens == plain and require_model(engine).draft.endswith(" (version 1)")
        assert [text.partition(" of the draft")[0] for text in notices] == ["Drafting with version 1"]
        sleep(1)
        assert not trainings(), "there is nothing new to learn"


def test_a_training_loads_the_models_as_the_engine_does() -> None:
    load = LoadOptions(
        context_size=512, threads=1, device=("CUDA1", "CUDA2"), gpu_layers=7, flash_attention=False, mmap=False,
        mlock=True, tensor_split="3,1", n_cpu_moe=2,
    )  # fmt: skip
    config = LoadConfig("python-6m", draft="model", load=load, max_bytes=2 * GIB, force=True)
    words = _make_command(config, "llamacpp")
    context = adapt_command.commands["train"].make_context("train", list(words[words.index("train") + 1 :]))
    stated = ("ctx", "device", "gpu_layers", "flash_attention", "mmap", "mlock", "tensor_split", "n_cpu_moe")
    expected = (512, "CUDA1,CUDA2", 7, False, False, True, "3,1", 2)
    assert tuple(context.params[name] for name in stated) == expected
    assert (context.params["max_memory"], context.params["force"], context.params["exact"]) == (2.0, True, False)
    assert (context.params["draft"], context.params["model"]) == ("model", "python-6m")


def test_nothing_is_learned_without_consent_or_texts(config: LoadConfig, pair: AdaptedPair) -> None:
    heard = Heard()
    with closing(LocalEngine()) as engine:
        engine.open(config, heard).result()
        assert heard.notices == ["Nothing is learned yet: `edgespec adapt` asks whether texts may be trained on."]
        answer(engine)
        sleep(1)
        assert not trainings() and not pair.folder.exists()
        engine.change_draft(replace(config, memory=None), heard).result()
        assert len(heard.notices) == 2 and heard.notices[1].startswith("Nothing is learned, because")
        allow_training(adapted_folder())
        engine.change_draft(replace(config, learn=replace(SOON, new_tokens=10**6)), heard).result()
        sleep(1)
        assert not trainings() and len(heard.notices) == 2


def test_a_training_that_fails_is_told_of_and_the_last(config: LoadConfig) -> None:
    allow_training(adapted_folder())
    failing = replace(config, learn=replace(SOON, training=("--draft", "missing.gguf")))
    with closing(LocalEngine()) as engine:
        engine.open(failing, Heard()).result()
        wait(trainings)
        wait(lambda: not trainings())
        sleep(0.5)
        (told,) = answer(engine)[1]
        sleep(1)
        assert not trainings()
    assert told.startswith("Learning has failed and stops: ") and "missing.gguf" in told


def test_a_training_ends_with_its_engine(config: LoadConfig) -> None:
    allow_training(adapted_folder())
    with closing(EngineProcess()) as client:
        client.open(config, Heard()).result()
        wait(trainings)
        (training,) = trainings()
        client.kill("the engine was killed")
        wait(lambda: has_ended(training))
        client.open(config, Heard()).result()
        wait(trainings)
        (training,) = trainings()
    assert has_ended(training), "closing an engine ends it at once"


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # one that no parent waits for
    except psutil.NoSuchProcess:
        return True
