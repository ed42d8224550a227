"""A trained DFlash head on MLX: its acceptance, and that of wrong readings of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgespec.backends.mlx.head_session import BlockHeadSession
from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.model import MlxModel
from edgespec.backends.mlx.session import MlxSession
from edgespec.controller.fixed import FixedLength
from edgespec.core.loop import speculate
from edgespec.core.protocols import Budget, CheckCancelled, Step
from edgespec.core.sampling import CounterRng, Sampler, SamplingParams
from edgespec.core.verify import AutoVerifier, SampleMatching, TokenRejection
from edgespec.drafters.sequential import RequestDraw
from tests.backends.mlx_pairs import PROMPTS, Answers, LateFeatures, answer, attach, measure, open_drafter
from tests.mlx_models import load_target
from tests.models import REPOSITORY

FOLDER = REPOSITORY / "tests" / "fixtures" / "heads" / "dflash-python-6m"
BLOCK = Budget(7, 7)


@pytest.fixture(scope="module")
def target() -> MlxModel:
    return load_target()


@pytest.fixture(scope="module")
def plain(target: MlxModel) -> Answers:
    return answer(target, None)


@pytest.fixture(scope="module")
def head(target: MlxModel) -> MlxHead:
    return attach(target, FOLDER)


@pytest.fixture(scope="module")
def rate(target: MlxModel, head: MlxHead, plain: Answers) -> float:
    return measure(target, head, plain, BLOCK)


def test_a_trained_head_is_accepted(target: MlxModel, head: MlxHead, plain: Answers, rate: float) -> None:
    assert rate > 0.4
    assert measure(target, head, plain, Budget(4, 12), 2) >= rate - 0.1, "trees"


def test_a_seed_gives_the_text_of_plain_decoding(target: MlxModel, head: MlxHead) -> None:
    found = answer(target, head, budget=BLOCK, temperature=0.8, prompts=PROMPTS[:1])
    assert found.texts == answer(target, None, temperature=0.8, prompts=PROMPTS[:1]).texts
    assert found.accepted


def test_drawn_chains_are_accepted(target: MlxModel, head: MlxHead) -> None:
    """By the rejection rule."""
    found = Answers()
    sampler = Sampler(SamplingParams(temperature=0.8), target.tokenizer.vocab_size)
    for prompt in PROMPTS:
        session = target.open_session()
        draw = RequestDraw(sampler, np.random.default_rng(3))
        controller = FixedLength([open_drafter(head, session)], Budget(4, 4), target.tokenizer.vocab_size, draw)
        rng = CounterRng(7)
        verifier = AutoVerifier(SampleMatching(sampler, rng), TokenRejection(sampler, rng))
        tokens = target.tokenizer.encode(prompt, parse_special=False)
        events = list(speculate(session, controller, verifier, tokens, max_tokens=40, stop=frozenset()))
        found.add(events)
        assert not controller.failures
        assert any(isinstance(event, Step) and event.n_drafted == 4 for event in events)
    assert found.rate > 0.25


@pytest.mark.parametrize("changes", [{"layers": (2, 4, 6)}, {"mask_token": 700}], ids=str)
def test_a_wrong_reading_is_accepted_less(
    target: MlxModel, plain: Answers, rate: float, changes: dict[str, Any]
) -> None:
    """And the text does not change, which `measure` checks."""
    assert measure(target, attach(target, FOLDER, **changes), plain, BLOCK) < rate - 0.03


def test_shifted_features_are_accepted_less(target: MlxModel, head: MlxHead, plain: Answers, rate: float) -> None:
    def open_late(network: Any, session: MlxSession, features: Any, check: CheckCancelled) -> BlockHeadSession:
        late: Any = LateFeatures(features)
        return BlockHeadSession(network, session, late, check)

    assert measure(target, MlxHead("dflash", head.network, open_late, head.tokenizer), plain, BLOCK) < rate - 0.05
