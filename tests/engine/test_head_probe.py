"""Heads whose files state a convention wrongly are read right, once; useless ones are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends import FileBackend, Model, open_model
from edgespec.backends.options import LoadOptions
from edgespec.cancel import cancellable
from edgespec.engine.head_probe import HeadProbe, ProbeResult, is_better
from edgespec.engine.loaded_model import LoadedModel
from edgespec.engine.open import Loader
from edgespec.engine.probe_store import ProbeStore
from edgespec.errors import Cancelled
from edgespec.formats.head_file import read_head
from edgespec.formats.heads import HeadSpec
from edgespec.models.load_config import LoadConfig
from edgespec.progress import reporting
from tests.gguf_models import TARGET
from tests.reporter import Heard
from tests.trained_heads import LAYERS, convert, make_ids_absolute, state_layers, tamper

OPTIONS = LoadOptions(threads=1, context_size=512)
TAMPERED: dict[str, Callable[[Path], Path]] = {
    "layers + 1": lambda path: state_layers(path, (2, 4, 6)),
    "layers - 1": lambda path: state_layers(path, (0, 2, 4)),
    "absolute ids": make_ids_absolute,
    "none": lambda path: tamper(path, {}),
}
Load = Callable[[LoadConfig], LoadedModel]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("EDGESPEC_CACHE_DIR", "EDGESPEC_CONFIG_DIR", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "EDGESPEC_CACHE_DIR" / "calibration"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tampered head by name, as a GGUF file."""
    folder, made = tmp_path_factory.mktemp("heads"), dict[str, Path]()

    def make(name: str) -> Path:
        if name not in made:
            made[name] = convert(TAMPERED[name](folder / name.replace(" ", "")))
        return made[name]

    return make


def open_target(backend: FileBackend) -> Model:
    return open_model(backend, TARGET, OPTIONS)


@pytest.fixture(scope="module")
def mlx() -> Iterator[Model]:
    target = open_target("mlx")
    yield target
    target.close()


@pytest.fixture(scope="module")
def llama() -> Iterator[Model]:
    target = open_target("llamacpp")
    yield target
    target.close()


def probe(target: Model, backend: FileBackend, path: Path, n_tokens: int = 256) -> tuple[HeadSpec, ProbeResult]:
    spec = read_head(path)
    assert spec is not None
    return spec, HeadProbe(target, path, backend, n_tokens=n_tokens).run(spec)


def test_mlx_reads_a_tampered_head_right(mlx: Model, tmp_path: Path) -> None:
    """A reading that a GGUF head does not leave open."""
    _, result = probe(mlx, "mlx", tamper(tmp_path / "head", {"norm_output": True}), 128)
    chosen = result.chosen
    assert (chosen.spec.layers, chosen.spec.norm_before_residual, chosen.spec.feeds_normed) == (LAYERS, False, False)
    assert result.stated is not None
    gains = [a - b for a, b in zip(chosen.agreement, result.stated.agreement, strict=True)]
    assert min(gains) >= 0 and max(gains) > 0.05
    assert min(chosen.agreement) > 0.4


@pytest.mark.parametrize("name", ["layers + 1", "layers - 1", "absolute ids", "none"])
def test_llamacpp_reads_a_tampered_head_right(llama: Model, files: Callable[[str], Path], name: str) -> None:
    spec, result = probe(llama, "llamacpp", files(name))
    assert result.chosen.spec == replace(spec, layers=LAYERS)
    assert min(result.chosen.agreement) > 0.4
    if name == "layers + 1":  # llama.cpp does not give the output of the last layer
        assert result.stated is None
    elif name == "layers - 1":
        assert result.stated is not None and result.stated.agreement[0] < result.chosen.agreement[0] - 0.05
    else:
        assert result.stated == result.chosen


@pytest.fixture
def load(heard: Heard) -> Iterator[Load]:
    with ExitStack() as closing:

        def loading(request: LoadConfig) -> LoadedModel:
            loaded = Loader().load(request)
            closing.callback(loaded.engine.close)
            return loaded

        yield loading


def config(path: Path, draft: str = "", **options: object) -> LoadConfig:
    """For a fixed length, which measures nothing."""
    return LoadConfig(draft=draft or str(path), draft_max=2, load=replace(OPTIONS, **options))  # type: ignore[arg-type]


def test_probed_once_and_told_at_each_load(
    load: Load, heard: Heard, files: Callable[[str], Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = files("layers - 1")
    loaded = load(config(path))
    (told,) = heard.notices
    assert told.startswith("The head is read with layers 1, 3, 5, where its file says layers 0, 2, 4: agreement 4")
    assert list(loaded.engine.drafters) == ["eagle3"]
    monkeypatch.setattr(HeadProbe, "run", None)  # a second probe would fail
    load(config(path))
    load(config(path, f"{path}+ngram", threads=2))
    assert heard.notices == [told] * 3
    (file,) = cache.glob("head-*.json")
    file.write_text(file.read_text().replace('"agreement"', '"disagreement"'))
    load(config(path))
    assert "is read as its file says, since it could not be probed: 'NoneType'" in heard.notices[-1]


def test_a_probe_that_fails_takes_the_file_at_its_word(load: Load, heard: Heard, files: Callable[[str], Path]) -> None:
    path = files("layers - 1")
    loaded = load(config(path, context_size=24))
    assert heard.notices == [
        f"The head {path} is read as its file says, since it could not be probed: a probe needs a text of 32 tokens, "
        "and has 22."
    ]
    assert list(loaded.engine.drafters) == ["eagle3"]


def test_a_cancelled_probe_ends_the_load(files: Callable[[str], Path], heard: Heard, cache: Path) -> None:
    probed: list[str] = []

    class Told(Heard):
        def loading(self, name: str, fraction: float) -> None:
            probed.extend([name] if " as layers " in name else [])

    def check() -> None:
        if len(probed) > 2:
            raise Cancelled

    path = files("none")
    with pytest.raises(Cancelled), cancellable(check), reporting(Told()):
        Loader().load(config(path))
    assert probed[0] == f"{path.name} as layers 1, 3, 5" and not list(cache.glob("head-*"))


def test_a_result_holds_for_what_the_file_says_and_one_runtime(llama: Model, files: Callable[[str], Path]) -> None:
    path = files("none")
    spec, result = probe(llama, "llamacpp", path, 64)
    store = ProbeStore(TARGET, path)
    store.save("llamacpp", spec, result)
    assert store.load("llamacpp", spec) == result
    assert store.load("mlx", spec) is None
    assert store.load("llamacpp", replace(spec, layers=(0, 1, 2))) is None


def test_a_lead_has_to_be_more_than_chance() -> None:
    right, wrong = np.ones((60, 2), bool), np.zeros((60, 2), bool)
    mostly = right.copy()
    mostly[::8] = False
    assert not any(is_better(*pair) for pair in ((wrong, right), (right, right), (mostly, right)))
    assert is_better(right, mostly), "8 positions"
    assert not is_better(right[:6], wrong[:6]) and is_better(right[:7], wrong[:7])
