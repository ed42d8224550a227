"""A trained EAGLE-3 head as --draft: loaded beside its target, drafting, and refused where it does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.backends.llamacpp.model import load as load_llama
from edgespec.backends.options import LoadOptions
from edgespec.engine.head_probe import HeadProbe
from edgespec.errors import DraftRefused
from edgespec.formats.head_file import read_head
from laboratory.cost_faithful import build
from laboratory.eagle3_gguf import convert
from laboratory.embedding.shapes import SHAPES, Size
from tests.gguf_models import REPOSITORY, TARGET
from tests.laboratory.answers import answer_plainly, check_autopilot, check_texts, load
from tests.reporter import Heard

TRAINED = REPOSITORY / "tests" / "fixtures" / "heads" / "eagle3-python-6m"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads") / "trained.gguf"
    convert(TRAINED, TARGET, path)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))


def agree(target: Path, head: Path) -> tuple[float, float]:
    """Shares of positions of a text at which the head's first and second choice is the target's."""
    model = load_llama(target, LoadOptions(threads=1, context_size=256))
    spec = read_head(head)
    assert spec is not None
    found = HeadProbe(model, head, "llamacpp", n_tokens=160).run(spec)
    model.close()
    assert not found.is_corrected
    return found.chosen.agreement


def test_a_head_is_widened_with_its_target(head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes the same function at the cost of the larger shape."""
    monkeypatch.setitem(SHAPES, "wide", Size(width=512, layers=7, kv_width=256, ffn=1024))
    build(TARGET, tmp_path / "wide.gguf", "wide", "F16")
    convert(TRAINED, tmp_path / "wide.gguf", tmp_path / "head.gguf", "Q8_0")
    spec = read_head(tmp_path / "head.gguf")
    assert spec is not None and (spec.hidden_size, spec.size, spec.layers) == (512, 512, (1, 3, 5))
    assert agree(tmp_path / "wide.gguf", tmp_path / "head.gguf") == pytest.approx(agree(TARGET, head), abs=0.05)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_those_of_plain_decoding(heard: Heard, head: Path, temperature: float) -> None:
    loaded = check_texts(heard, TARGET, str(head), answer_plainly(heard, TARGET, temperature), temperature)
    assert loaded.info.drafters == {"eagle3": str(head)}


def test_the_autopilot_prices_it_beside_lookups(heard: Heard, head: Path) -> None:
    check_autopilot(heard, TARGET, str(head), "eagle3")


def test_a_head_that_does_not_fit_is_refused(heard: Heard, tmp_path: Path, head: Path) -> None:
    draft = TARGET.with_name("draft.gguf")
    with pytest.raises(DraftRefused, match=r"an EAGLE-3 head for a hidden size of 256; the target has 128\."):
        load(heard, draft, str(head))
    with pytest.raises(DraftRefused, match="is no trained head") as refused:
        load(heard, TARGET, f"eagle3:{draft}")
    assert refused.value.hint == f"Name {draft} without 'eagle3:'."
    with pytest.raises(DraftRefused, match="there is no eagle3 head"):
        load(heard, TARGET, "eagle3")
