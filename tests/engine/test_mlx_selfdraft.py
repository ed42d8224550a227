"""Self-drafts on MLX through the engine: they change no text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgespec.autopilot.speculation import Speculation
from edgespec.backends.mlx.model import MlxModel, load
from edgespec.backends.options import LoadOptions
from edgespec.bench.divergence import first_divergence
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.text.chat_template import encode_prompt
from tests.backends.test_mlx_selfdraft import METHODS, make_draft
from tests.engine.conftest import PLAIN, eager, generate, list_loaded
from tests.engine.prompts import CODE
from tests.gguf_models import TARGET

TOKENS = 10


@pytest.fixture(scope="module")
def model() -> Iterator[MlxModel]:
    model = load(TARGET, LoadOptions(context_size=256))
    yield model
    model.close()


@pytest.mark.parametrize("method", METHODS)
def test_text_is_plain_decodings(model: MlxModel, method: str) -> None:
    """Greedy, by fixed chains and trees and by the autopilot; and drawn with a seed."""
    prompt = CODE[1]
    asked = Request(prompt, SamplingParams(temperature=0), max_tokens=TOKENS)
    drawn = Request(prompt, SamplingParams(temperature=0.8), max_tokens=TOKENS, seed=5)
    expected, sampled = (generate(Engine(model, [], PLAIN), each)[1].tokens for each in (asked, drawn))
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
