"""How draft tokens are chosen: the best ones by hand, drawn ones with the law they carry."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.core.sampling import Sampler, SamplingParams, index_at
from edgespec.drafters.sequential import MAX_SIBLINGS, RequestDraw, best_tokens
from edgespec.errors import BackendError

V = 8


def test_the_best_tokens_in_order_of_their_probability() -> None:
    """Ties go to the lower id; far less probable tokens are no candidates."""
    tokens, probabilities = best_tokens(np.log(np.array([0.2, 0.3, 0.001, 0.2, 0.299], np.float32)))
    assert tokens == [1, 4, 0, 3] and len(tokens) == 1 + MAX_SIBLINGS
    assert probabilities == pytest.approx([0.3, 0.299, 0.2, 0.2], rel=1e-5)
    tokens, probabilities = best_tokens(np.array([-3.9, 0.0, -4.1, -np.inf], np.float32))
    assert tokens == [1, 0]
    assert probabilities == pytest.approx([0.9644926, 0.01952317], rel=1e-5)
    assert best_tokens(np.tile(np.array([0, 1], np.float32), 500))[0] == [1, 3, 5, 7]


@pytest.mark.parametrize("score", [np.nan, np.inf, -np.inf])
def test_scores_that_are_no_numbers_are_an_error(score: float) -> None:
    logits = np.full(V, -np.inf, np.float32)
    logits[3] = score
    for choose in (
        best_tokens,
        lambda row: RequestDraw(Sampler(SamplingParams(), V), np.random.default_rng(0)).draw(row, [1]),
    ):
        with pytest.raises(BackendError, match="NaN or infinite logits"):
            choose(logits)


def test_draws_are_the_samplers() -> None:
    sampler = Sampler(SamplingParams(temperature=0.9, top_k=6, presence_penalty=0.4, penalty_window=6), V)
    draw, rng = RequestDraw(sampler, np.random.default_rng(5)), np.random.default_rng(5)
    logits = np.random.default_rng(1).standard_normal(V).astype(np.float32)
    for prefix in ([1, 2], [3], [4, 4, 4]):
        token, q = draw.draw(logits, prefix)
        distribution = sampler.distribution(logits, prefix)
        assert q.tolist() == distribution.dense(V).tolist()
        assert token == distribution.token(index_at(distribution.weights, rng.random()))
