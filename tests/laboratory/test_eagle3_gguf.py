"""A trained EAGLE-3 head as --draft: loaded beside its target, drafting, and refused where it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.backends.llamacpp.model import load as load_llama
from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Notice, Request
from edgespec.errors import DraftRefused
from edgespec.formats.head_file import read_head
from edgespec.planner.head_probe import HeadProbe
from edgespec.planner.plan import LoadConfig
from edgespec.service.load import LoadedModel, Loader
from laboratory.cost_faithful import build
from laboratory.eagle3_gguf import convert
from laboratory.embedding.shapes import SHAPES, Size
from tests.backends.eagle3_heads import make_head
from tests.models import REPOSITORY, TARGET
from tests.reporter import Heard

TRAINED = REPOSITORY / "tests" / "fixtures" / "heads" / "eagle3-python-6m"
PROMPTS = ("def read_lines(path):", "class Config:\n    def __init__(self", "import os\n\n\ndef list_files(folder")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads") / "trained.gguf"
    convert(TRAINED, TARGET, path)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def heard() -> Iterator[Heard]:
    yield Heard()


def load(heard: Heard, draft: str, draft_max: int | None = 3, target: Path = TARGET) -> LoadedModel:
    options = LoadOptions(threads=1, context_size=512, exact=True)
    return Loader(heard, lambda: None).load(LoadConfig(str(target), load=options, draft=draft, draft_max=draft_max))


def generate(engine: Engine, temperature: float = 0.0) -> tuple[list[tuple[int, ...]], int, int]:
    """(the tokens of each text, how many were drafted, how many of these accepted); nothing else was said."""
    texts, drafted, accepted = [], 0, 0
    for prompt in PROMPTS:
        for event in engine.stream(Request(prompt, SamplingParams(temperature=temperature), 64, seed=5)):
            assert not isinstance(event, Notice), event
            if isinstance(event, Step):
                drafted, accepted = drafted + event.n_drafted, accepted + event.n_accepted
            elif isinstance(event, Finished):
                texts.append(event.tokens)
    return texts, drafted, accepted


def agree(target: Path, head: Path) -> tuple[float, float]:
    """Shares of positions of a text at which the head's first and second choice is the target's."""
    model = load_llama(target, LoadOptions(threads=1, context_size=256))
    spec = read_head(head)
    assert spec is not None
    found = HeadProbe(model, head, "llamacpp", lambda: None, n_tokens=160).run(spec)
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
    plain = load(heard, "none")
    wanted, drafted, _ = generate(plain.engine, temperature)
    plain.engine.close()
    assert not drafted
    loaded = load(heard, str(head))
    found, drafted, accepted = generate(loaded.engine, temperature)
    assert found == wanted and loaded.info.drafters == {"eagle3": str(head)}
    assert accepted > drafted * (0.35 if temperature == 0 else 0.2), "trained for this target"
    loaded.engine.close()


def test_the_autopilot_prices_it_beside_lookups(heard: Heard, head: Path) -> None:
    loaded = load(heard, f"{head}+ngram", None)
    costs = loaded.engine.draft_stats.costs
    assert costs.has_cost("eagle3") and costs.unit_s("eagle3") > 0
    found, _, _ = generate(loaded.engine)
    loaded.engine.close()
    plain = load(heard, "none")
    assert found == generate(plain.engine)[0]
    plain.engine.close()


def test_a_random_head_is_refused(heard: Heard, tmp_path: Path) -> None:
    with pytest.raises(DraftRefused, match="agrees less with this target than lookups do: its first choice is right"):
        load(heard, f"eagle3:{make_head(tmp_path / 'random.gguf').path}")


def test_a_head_that_does_not_fit_is_refused(heard: Heard, tmp_path: Path, head: Path) -> None:
    draft = TARGET.with_name("draft.gguf")
    with pytest.raises(DraftRefused, match=r"an EAGLE-3 head for a hidden size of 256; the target has 128\."):
        load(heard, str(head), target=draft)
    with pytest.raises(DraftRefused, match="is no trained head") as refused:
        load(heard, f"eagle3:{draft}")
    assert refused.value.hint == f"Use --draft {draft}, without 'eagle3:'."
    with pytest.raises(DraftRefused, match="there is no eagle3 head"):
        load(heard, "eagle3")
