"""The engine on MLX: drafts change nothing, also beyond a sliding window."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from edgespec.backends.mlx.model import load
from edgespec.backends.options import LoadOptions
from edgespec.bench.runner import first_divergence
from edgespec.core.protocols import PrefillProgress
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Request
from edgespec.text.chat_template import encode_prompt
from tests.engine.conftest import PLAIN, generate, list_loaded
from tests.engine.prompts import CODE
from tests.engine.test_parity import DRAFTS
from tests.mlx_models import CONFIGS, make_folder
from tests.models import DRAFT, TARGET

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def pair() -> Iterator[Engine]:
    target, draft = (load(path, LoadOptions(context_size=256)) for path in (TARGET, DRAFT))
    engine = Engine(target, list_loaded(model=draft), PLAIN)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain(pair: Engine) -> dict[str, tuple[int, ...]]:
    pair.speculation = PLAIN
    return {p: generate(pair, Request(p, GREEDY, max_tokens=32))[1].tokens for p in CODE[:3]}


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_output_is_plain_decodings(pair: Engine, plain: dict[str, tuple[int, ...]], name: str) -> None:
    pair.speculation = DRAFTS[name]
    accepted = 0
    for prompt, expected in plain.items():
        _, finished = generate(pair, Request(prompt, GREEDY, max_tokens=32))
        accepted += finished.metrics.accepted_tokens
        if finished.tokens != expected:
            session = pair.target.open_session(lambda: None)
            tokens = encode_prompt(pair.target.tokenizer, prompt, parse_special=True)
            fork = first_divergence(session, tokens, expected, finished.tokens)
            assert fork is not None and fork.is_near_tie, (prompt, fork)
    assert accepted > 0


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.7, top_k=20, top_p=0.9)])
@pytest.mark.parametrize("name", ["model", "model-tree", "ngram"])
def test_a_seed_gives_the_text_of_plain_decoding(pair: Engine, name: str, params: SamplingParams) -> None:
    texts = []
    for speculation in (PLAIN, DRAFTS[name]):
        pair.speculation = speculation
        texts.append(generate(pair, Request(CODE[1], params, max_tokens=32, seed=5))[0])
    assert texts[0] == texts[1]


def test_the_next_turn_reuses_the_cache(pair: Engine) -> None:
    pair.speculation = DRAFTS["model"]
    first, finished = generate(pair, Request(CODE[0], GREEDY, max_tokens=8))
    events = list(pair.stream(Request(CODE[0] + first, GREEDY, max_tokens=4)))
    progress = [event for event in events if isinstance(event, PrefillProgress)]
    again = list(pair.stream(Request(CODE[0] + first, GREEDY, max_tokens=4)))
    assert next(e for e in again if isinstance(e, PrefillProgress)).done == progress[-1].total
    assert finished.tokens


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


@pytest.mark.parametrize("name", ["plain", "ngram", "ngram-tree", "model"])
def test_beyond_a_sliding_window(windowed: tuple[Engine, tuple[int, ...]], name: str) -> None:
    engine, expected = windowed
    engine.speculation = DRAFTS.get(name, PLAIN)
    _, finished = generate(engine, Request(CODE[3], GREEDY, max_tokens=96))
    assert len(finished.tokens) > 60
    assert finished.tokens == expected[: len(finished.tokens)]
