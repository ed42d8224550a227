"""Greedy output with every drafter is plain decoding's, up to near-ties that are shown to be near."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgespec.backends.options import LoadOptions
from edgespec.bench.runner import first_divergence
from edgespec.core.sampling import SamplingParams
from edgespec.engine.drafting import Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Request
from edgespec.text.chat_template import encode_prompt
from tests.engine.conftest import PLAIN, generate, open_engine
from tests.engine.prompts import CODE
from tests.models import DRAFT, TARGET

GREEDY = SamplingParams(temperature=0)
DRAFTS = {
    "model": Speculation(("model",), 3, 3),
    "model-long": Speculation(("model",), 8, 8),
    "model-tree": Speculation(("model",), 3, 8),
    "ngram": Speculation(("ngram",), 4, 4),
    "ngram-tree": Speculation(("ngram",), 4, 10),
    "rejection-at-zero": Speculation(("model",), 3, 3, "rejection"),
}


@pytest.fixture(scope="module")
def plain(engine: Engine) -> dict[str, tuple[int, ...]]:
    engine.speculation = PLAIN
    return {p: generate(engine, Request(p, GREEDY, max_tokens=48))[1].tokens for p in CODE[:8]}


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_output_is_plain_decodings(engine: Engine, plain: dict[str, tuple[int, ...]], name: str) -> None:
    engine.speculation = DRAFTS[name]
    drafted = 0
    for prompt, expected in plain.items():
        _, finished = generate(engine, Request(prompt, GREEDY, max_tokens=48))
        drafted += finished.metrics.accepted_tokens
        if finished.tokens == expected:
            continue
        session = engine.target.open_session(lambda: None)
        tokens = encode_prompt(engine.target.tokenizer, prompt, parse_special=True)
        fork = first_divergence(session, tokens, expected, finished.tokens)
        session.close()
        assert fork is not None and fork.is_near_tie, (prompt, fork)
    assert drafted > 0


@pytest.fixture(scope="module")
def exact_engine() -> Iterator[Engine]:
    """The packaged pair with numerics that do not depend on the number of rows."""
    opened = open_engine(TARGET, DRAFT, LoadOptions(threads=1, context_size=512, exact=True))
    yield opened
    opened.close()


@pytest.mark.parametrize("name", ["model", "model-long", "model-tree", "ngram", "ngram-tree"])
def test_a_seed_gives_plain_decodings_text(exact_engine: Engine, name: str) -> None:
    """Chance is drawn by position: where rounding is out of the way, sampled text does not depend on the drafter."""
    for seed, prompt in enumerate(CODE[:6]):
        request = Request(prompt, SamplingParams(temperature=0.9, top_p=0.95), max_tokens=40, seed=seed)
        exact_engine.speculation = PLAIN
        expected = generate(exact_engine, request)[1]
        exact_engine.speculation = DRAFTS[name]
        finished = generate(exact_engine, request)[1]
        assert finished.tokens == expected.tokens
        assert finished.seed == expected.seed == seed
