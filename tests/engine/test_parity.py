"""Drafts change nothing: greedy and seeded text is plain decoding's on both runtimes, also beyond a sliding window."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from edgespec.autopilot.speculation import Speculation
from edgespec.backends.mlx.model import load
from edgespec.backends.options import LoadOptions
from edgespec.bench.divergence import first_divergence
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Request
from edgespec.text.chat_template import encode_prompt
from tests.engine.conftest import PLAIN, generate, list_loaded, open_engine
from tests.engine.prompts import CODE
from tests.gguf_models import DRAFT, TARGET
from tests.mlx_models import CONFIGS, make_folder

GREEDY = SamplingParams(temperature=0)
DRAFTS = {
    "model": Speculation(("model",), 3, 3),
    "model-long": Speculation(("model",), 8, 8),
    "model-tree": Speculation(("model",), 3, 8),
    "ngram": Speculation(("ngram",), 4, 4),
    "ngram-tree": Speculation(("ngram",), 4, 10),
    "rejection-at-zero": Speculation(("model",), 3, 3, "rejection"),
}
Pair = tuple[Engine, dict[str, tuple[int, ...]]]


@pytest.fixture(scope="module", params=["llamacpp", "mlx"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The trained pair on a runtime, and what plain decoding says."""
    if request.param == "llamacpp":
        engine = request.getfixturevalue("engine")
    else:
        target, draft = (load(path, LoadOptions(context_size=256)) for path in (TARGET, DRAFT))
        engine = Engine(target, list_loaded(model=draft), PLAIN)
    engine.speculation = PLAIN
    yield engine, {p: generate(engine, Request(p, GREEDY, max_tokens=32))[1].tokens for p in CODE[:3]}
    if request.param == "mlx":
        engine.close()


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_output_is_plain_decodings(pair: Pair, name: str) -> None:
    engine, plain = pair
    engine.speculation = DRAFTS[name]
    accepted = 0
    for prompt, expected in plain.items():
        _, finished = generate(engine, Request(prompt, GREEDY, max_tokens=32))
        accepted += finished.metrics.accepted_tokens
        if finished.tokens == expected:
            continue
        session = engine.target.open_session()
        tokens = encode_prompt(engine.target.tokenizer, prompt, parse_special=True)
        fork = first_divergence(session, tokens, expected, finished.tokens)
        session.close()
        assert fork is not None and fork.is_near_tie, (prompt, fork)
    assert accepted > 0


@pytest.fixture(scope="module")
def exact_engine() -> Iterator[Engine]:
    """The packaged pair with numerics that do not depend on the number of rows."""
    opened = open_engine(TARGET, DRAFT, LoadOptions(threads=1, context_size=512, exact=True))
    yield opened
    opened.close()


@pytest.mark.parametrize("name", ["model", "model-tree", "ngram"])
def test_a_seed_gives_plain_decodings_text(exact_engine: Engine, name: str) -> None:
    """Chance is drawn by position: where rounding is out of the way, sampled text does not depend on the drafter."""
    for seed, prompt in enumerate(CODE[:3]):
        request = Request(prompt, SamplingParams(temperature=0.9, top_p=0.95), max_tokens=40, seed=seed)
        exact_engine.speculation = PLAIN
        expected = generate(exact_engine, request)[1]
        exact_engine.speculation = DRAFTS[name]
        finished = generate(exact_engine, request)[1]
        assert finished.tokens == expected.tokens
        assert finished.seed == expected.seed == seed


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, tuple[int, ...]]]:
    """A sliding-window pair, and what mlx_lm's plain generation says four windows beyond the first."""
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    root = tmp_path_factory.mktemp("windowed")
    paths = [make_folder(root / str(seed), CONFIGS["sliding-window"], seed=seed) for seed in (0, 1)]
    models = [load(path, LoadOptions(context_size=512)) for path in paths]
    tokens = encode_prompt(models[0].tokenizer, CODE[3], parse_special=True)
    steps = generate_step(mx.array(tokens), load_model(paths[0])[0], max_tokens=96)
    engine = Engine(models[0], list_loaded(model=models[1]), PLAIN)
    yield engine, tuple(int(token) for token, _ in steps)
    engine.close()


@pytest.mark.parametrize("name", ["plain", "ngram-tree", "model"])
def test_beyond_a_sliding_window(windowed: tuple[Engine, tuple[int, ...]], name: str) -> None:
    engine, expected = windowed
    engine.speculation = DRAFTS.get(name, PLAIN)
    _, finished = generate(engine, Request(CODE[3], GREEDY, max_tokens=96))
    assert len(finished.tokens) > 60
    assert finished.tokens == expected[: len(finished.tokens)]
