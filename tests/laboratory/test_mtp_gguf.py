"""The embedded target as a model with an MTP layer: the same model, and its trained layer drafts for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.llamacpp.model import load as load_model
from edgespec.backends.options import LoadOptions
from laboratory.mtp_gguf import convert
from tests.contract.toys import prefill
from tests.gguf_models import DRAFT, REPOSITORY, TARGET, llama, sliding_window
from tests.laboratory.answers import answer_plainly, check_autopilot, check_texts
from tests.reporter import Heard

TRAINED = REPOSITORY / "tests" / "fixtures" / "heads" / "mtp-python-6m"
TEXT: list[int] = np.random.default_rng(8).integers(1, 4000, 100).tolist()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the target with the trained layer, the layer alone)"""
    folder = tmp_path_factory.mktemp("mtp")
    convert(TRAINED, TARGET, folder / "model.gguf")
    convert(TRAINED, TARGET, folder / "alone.gguf", is_alone=True)
    return folder / "model.gguf", folder / "alone.gguf"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))


def logits_of(path: Path) -> np.ndarray:
    """[V] after TEXT."""
    model = load_model(path, LoadOptions(context_size=256, threads=1))
    session = model.open_session()
    z = prefill(session, TEXT).copy()
    session.close()
    model.close()
    return z


def test_the_model_is_the_llama_that_it_was_made_of(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Up to the order of sums: the packaged model in 8 bits, and one in single precision of the head's width."""
    assert np.abs(logits_of(files[0]) - logits_of(TARGET)).max() < 0.15, "as much as the number of rows changes"
    llama(tmp_path / "llama.gguf", width=256)
    convert(TRAINED, tmp_path / "llama.gguf", tmp_path / "mixture.gguf")
    found, wanted = logits_of(tmp_path / "mixture.gguf"), logits_of(tmp_path / "llama.gguf")
    assert wanted.std() > 1
    np.testing.assert_allclose(found, wanted, atol=2e-3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_those_of_plain_decoding(heard: Heard, files: tuple[Path, Path], temperature: float) -> None:
    model, alone = files
    wanted = answer_plainly(heard, model, temperature)
    for draft in ("mtp", f"mtp:{alone}"):
        check_texts(heard, model, draft, wanted, temperature)


def test_the_autopilot_prices_it_beside_lookups(heard: Heard, files: tuple[Path, Path]) -> None:
    check_autopilot(heard, files[0], "mtp", "mtp")


def test_what_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    sliding_window(tmp_path / "gemma.gguf")
    with pytest.raises(ValueError, match="no llama"):
        convert(TRAINED, tmp_path / "gemma.gguf", tmp_path / "out.gguf")
    with pytest.raises(ValueError, match="hidden size of 256, the target of 128"):
        convert(TRAINED, DRAFT, tmp_path / "out.gguf")
    with pytest.raises(ValueError, match=r"the head lacks mtp\.fc\.weight"):
        convert(TRAINED.with_name("eagle3-python-6m"), TARGET, tmp_path / "out.gguf")
