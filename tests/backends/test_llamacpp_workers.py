"""Models whose layers are divided between this process and workers: the same texts, with any draft."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.llamacpp import rpc
from edgespec.backends.llamacpp.model import load
from edgespec.backends.llamacpp.remote_devices import RemoteDevices
from edgespec.backends.llamacpp.weights_cache import WeightsCache
from edgespec.backends.options import LoadOptions
from edgespec.client.local import LocalEngine
from edgespec.core.decoding import decode_one, read_prompt
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import Finished, Request
from edgespec.errors import BackendError, DoesNotFit
from edgespec.models.load_config import LoadConfig
from tests.gguf_models import TARGET
from tests.reporter import Heard
from tests.trained_heads import EAGLE3, convert
from tests.workers import WorkerProcess, free_port, limit_memory, make_large, started_worker

PROMPT = "def read_lines(path):\n"
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"EDGESPEC_{name}_DIR", str(tmp_path / name.lower()))


@pytest.fixture(scope="module")
def addresses() -> Iterator[tuple[str, str]]:
    with started_worker() as one, started_worker() as two:
        yield one.address, two.address


def answer(workers: tuple[str, ...], draft: str = "none", **options: object) -> tuple[int, ...]:
    config = LoadConfig(
        draft=draft,
        draft_max=3,
        load=LoadOptions(context_size=512, threads=1, workers=workers, **options),  # type: ignore[arg-type]
    )
    engine = LocalEngine()
    try:
        engine.open(config, Heard()).result()
        (finished,) = [
            each for each in engine.stream(Request(PROMPT, GREEDY, 80, seed=1)) if isinstance(each, Finished)
        ]
    finally:
        engine.close()
    return finished.tokens


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return answer(())


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("draft", ["none", "ngram+model"])
def test_the_text_over_workers_is_that_of_one_process(
    n: int, draft: str, addresses: tuple[str, str], alone: tuple[int, ...]
) -> None:
    assert answer(addresses[:n], draft) == alone


def test_scores_over_workers_are_those_of_one_process_but_for_rounding(addresses: tuple[str, str]) -> None:
    """Repacked weights round otherwise, and workers have none."""

    def score(workers: tuple[str, ...]) -> np.ndarray:
        model = load(TARGET, LoadOptions(context_size=256, threads=1, workers=workers))
        session = model.open_session()
        rows = [read_prompt(session, list(range(50, 80))).logits(0).copy()]
        rows += [decode_one(session, token) for token in range(100, 120)]
        session.close()
        model.close()
        return np.array(rows)

    expected = score(())
    assert np.abs(score(addresses[:1]) - expected).max() < 0.15
    assert np.abs(score(addresses) - expected).max() < 0.15


def test_exact_texts_over_a_worker_do_not_depend_on_the_draft(addresses: tuple[str, str]) -> None:
    plain = answer(addresses[:1], exact=True, exact_width=4)
    assert len(plain) == 80
    assert answer(addresses[:1], "ngram+model", exact=True, exact_width=4) == plain


@pytest.mark.parametrize("draft", ["layerskip:2", "qspec:4", "sparse:4,64"])
def test_self_drafts_of_a_divided_target(draft: str, addresses: tuple[str, str], alone: tuple[int, ...]) -> None:
    assert answer(addresses, draft) == alone


def test_a_trained_head_on_a_divided_target(tmp_path: Path, addresses: tuple[str, str], alone: tuple[int, ...]) -> None:
    shutil.copytree(EAGLE3, tmp_path / "head")
    assert answer(addresses, f"eagle3:{convert(tmp_path / 'head')}") == alone


def test_a_worker_is_free_again_once_the_model_is_closed(addresses: tuple[str, str], alone: tuple[int, ...]) -> None:
    model = load(TARGET, LoadOptions(context_size=256, threads=1, workers=addresses[:1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgespec.machines.workers._ANSWER_S", 0.5)
        with pytest.raises(BackendError, match="serves another program"):
            load(TARGET, LoadOptions(context_size=256, threads=1, workers=addresses))
    model.close()
    assert answer(addresses) == alone


def test_a_worker_whose_name_is_not_known_is_not_connected(
    addresses: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a name server answers no more; a later end of the process would blame the worker."""

    def refuse(address: str) -> tuple[str, int]:
        raise BackendError("unknown", hint="")

    monkeypatch.setattr("edgespec.backends.llamacpp.remote_devices.resolve", refuse)
    with pytest.raises(BackendError, match="unknown"):
        RemoteDevices(addresses)
    assert not rpc.connected


def test_layers_outside_of_the_processor(addresses: tuple[str, str], alone: tuple[int, ...]) -> None:
    assert answer(addresses[:1], gpu_layers=1) == alone == answer(addresses[:1], gpu_layers=6)


def test_a_worker_without_memory_for_its_part(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    make_large(path, layers=12)
    worker = WorkerProcess(free_port(), setup=limit_memory(600 * 2**20))
    try:
        with pytest.raises(DoesNotFit, match=r"^a worker has no memory for its part of large\.gguf: ") as refusal:
            load(path, LoadOptions(context_size=64, threads=1, gpu_layers=12, workers=(worker.address,)))
        assert "--gpu-layers" in refusal.value.hint
    finally:
        worker.end(signal.SIGKILL)


def test_weights_are_sent_once_to_a_worker_with_a_cache(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    make_large(path, layers=2)

    def first_row(address: str) -> np.ndarray:
        model = load(path, LoadOptions(context_size=64, threads=1, gpu_layers=2, workers=(address,)))
        session = model.open_session()
        row = read_prompt(session, [5, 6, 7]).logits(0).copy()
        session.close()
        model.close()
        return row

    with started_worker("--cache", EDGESPEC_CACHE_DIR=str(tmp_path / "kept")) as worker:
        sent = first_row(worker.address)
        files = {each: each.stat().st_mtime_ns for each in (tmp_path / "kept" / "worker").glob("[0-9a-f]*")}
        assert len(files) == 6 and all(each.stat().st_size > 10 * 2**20 for each in files)
        assert np.array_equal(first_row(worker.address), sent)
        assert {each: each.stat().st_mtime_ns for each in files} == files
    with started_worker("--cache", EDGESPEC_CACHE_DIR=str(tmp_path / "kept")) as worker:
        assert np.array_equal(first_row(worker.address), sent)


def test_files_of_a_connection_that_was_cut_off_are_not_used(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path / "worker")
    (cache.folder / "00").write_bytes(b"whole")
    os.utime(cache.folder / "00", (1e9, 1e9))
    cache.begin()
    (cache.folder / "01").write_bytes(b"a part")
    assert {each.name for each in WeightsCache(cache.folder).folder.iterdir()} == {"00"}
    cache.begin()
    (cache.folder / "02").write_bytes(b"whole")
    cache.end()
    assert {each.name for each in WeightsCache(cache.folder).folder.iterdir()} == {"00", "02"}
    assert cache.size == 10
