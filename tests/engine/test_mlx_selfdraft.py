"""Self-drafts on MLX through the engine: they change no text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgespec.backends.mlx.model import MlxModel, load
from edgespec.backends.options import LoadOptions
from edgespec.bench.runner import first_divergence
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.drafting import Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.text.chat_template import encode_prompt
from tests.backends.test_mlx_selfdraft import METHODS, SIX, make_draft
from tests.engine.conftest import PLAIN, eager, generate, list_loaded
from tests.engine.prompts import CODE
from tests.mlx_models import make_folder
from tests.models import TARGET, find_trained

TOKENS = 10


@pytest.fixture(scope="module")
def quantized() -> Iterator[MlxModel]:
    model = load(TARGET, LoadOptions(context_size=256))
    yield model
    model.close()


@pytest.fixture(scope="module")
def floating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlxModel]:
    folder = find_trained("target").parent
    if not (folder / "config.json").is_file():
        folder = make_folder(tmp_path_factory.mktemp("mlx") / "m", SIX)
    model = load(folder, LoadOptions(context_size=256))
    yield model
    model.close()


@pytest.fixture(scope="module")
def texts() -> dict[str, list[tuple[int, ...]]]:
    """What models say by plain decoding, greedily and drawn."""
    return {}


@pytest.mark.parametrize("which", ["quantized", "floating"])
@pytest.mark.parametrize("method", METHODS)
def test_text_is_plain_decodings(
    request: pytest.FixtureRequest, texts: dict[str, list[tuple[int, ...]]], which: str, method: str
) -> None:
    """Greedy, by fixed chains and trees and by the autopilot; and drawn with a seed."""
    model: MlxModel = request.getfixturevalue(which)
    prompt = CODE[1]
    asked = Request(prompt, SamplingParams(temperature=0), max_tokens=TOKENS)
    drawn = Request(prompt, SamplingParams(temperature=0.8), max_tokens=TOKENS, seed=5)
    if which not in texts:
        texts[which] = [generate(Engine(model, [], PLAIN), each)[1].tokens for each in (asked, drawn)]
    expected, sampled = texts[which]
    engine = Engine(model, list_loaded(self=make_draft(model, method)), PLAIN)
    engine.draft_stats = eager(0.0)
    n_accepted = 0
    for spec in (Speculation(("self",), 3), Speculation(("self",), 2, 4), Speculation(("ngram", "self"))):
        engine.speculation = spec
        events = list(engine.stream(asked))
        found = events[-1]
        assert isinstance(found, Finished)
        n_accepted += found.metrics.accepted_tokens
        decisions = [step.decision for step in events if isinstance(step, Step)]
        assert spec.draft_max is not None or any(each.drafted for each in decisions if each is not None)
        if found.tokens != expected:
            tokens = encode_prompt(model.tokenizer, prompt, parse_special=True)
            fork = first_divergence(model.open_session(), tokens, expected, found.tokens)
            assert fork is not None and fork.is_near_tie, (spec, fork)
    assert n_accepted > 0
    engine.speculation = Speculation(("self",), 3, acceptance="sample")
    assert generate(engine, drawn)[1].tokens == sampled
    engine.release_draft()
