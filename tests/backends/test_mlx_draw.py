"""Drawing on the device gives the host's tokens, or leaves the row to the host."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from edgespec.backends.mlx.scores import MlxScores
from edgespec.core.arrays import Logits
from edgespec.core.protocols import Draft
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.scores import HostScores
from edgespec.core.verify import SampleMatching
from edgespec.core.weights import index_at
from edgespec.errors import BackendError

PARAMS = {
    "temperature": SamplingParams(temperature=0.7),
    "one": SamplingParams(),
    "hot": SamplingParams(temperature=3.0),
    "cold": SamplingParams(temperature=0.05),
    "min-p": SamplingParams(temperature=0.8, min_p=0.05),
    "top-k": SamplingParams(temperature=0.9, top_k=20),
    "top-k-top-p": SamplingParams(temperature=0.6, top_k=40, top_p=0.9),
    "all": SamplingParams(temperature=1.2, top_k=50, top_p=0.95, min_p=0.02),
}


def rows(seed: int, n: int, vocab_size: int) -> Logits:
    rng = np.random.default_rng(seed)
    z: Logits = (rng.standard_normal((n, vocab_size)) * rng.uniform(1, 5, (n, 1))).astype(np.float32)
    z[0, ::2] = -np.inf
    return z


def on_host(z: Logits, params: SamplingParams, u: float) -> int:
    distribution = Sampler(params, len(z)).distribution(z, ())
    return distribution.token(index_at(distribution.weights, u))


@pytest.mark.parametrize("vocab_size", [60, 1024, 5000, 32_001])
@pytest.mark.parametrize("name", PARAMS)
def test_the_device_draws_what_the_host_draws(name: str, vocab_size: int) -> None:
    n, decided = 24, 0
    for seed in range(6):
        z = rows(seed, n, vocab_size)
        u = [CounterRng(seed).uniform(i) for i in range(n)]
        drawn = MlxScores(mx.array(z)).draw(PARAMS[name], u)
        assert drawn is not None
        for row, token in enumerate(drawn.tolist()):
            if token >= 0:
                decided += 1
                assert token == on_host(z[row], PARAMS[name], u[row])
    assert decided > (0.2 if name == "hot" else 0.75) * 6 * n, "only flat laws leave many borders near a draw"


def test_borders_are_left_to_the_host() -> None:
    """A draw on the border of two tokens, ties at the border of top-k, and rows that hold no numbers."""
    z = np.zeros((1, 4), np.float32)
    for u in (0.0, 0.25, 0.5, 0.75, 1 - 2**-53):
        assert MlxScores(mx.array(z)).draw(SamplingParams(), [u]).tolist() == [-1]
    assert MlxScores(mx.array(z)).draw(SamplingParams(top_k=2), [0.3]).tolist() == [-1]
    assert MlxScores(mx.array(z)).draw(SamplingParams(), [0.3]).tolist() == [1]
    assert MlxScores(mx.full((1, 4), float("nan"))).draw(SamplingParams(), [0.3]).tolist() == [-1]
    with pytest.raises(BackendError, match="NaN or infinite logits"):
        MlxScores(mx.full((1, 4), float("nan"))).argmax()


def test_weights_that_are_equal_although_their_logits_are_not() -> None:
    """The host orders a nucleus by weight, then by id; the device must not decide by a logit a rounding above."""
    z = np.full((1, 8), -9, np.float32)
    z[0, [6, 2, 5, 1]] = 0.5, 0.0, 1e-9, -1.0
    params = SamplingParams(top_k=4, top_p=0.5)
    for i in range(100):
        u = CounterRng(7).uniform(i)
        (token,) = MlxScores(mx.array(z)).draw(params, [u]).tolist()
        assert token in (-1, on_host(z[0], params, u))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.9),
        SamplingParams(typical_p=0.9),
        SamplingParams(top_k=2000),
        SamplingParams(temperature=1e-5),
        SamplingParams(presence_penalty=1),
        SamplingParams(logit_bias=((3, 1.0),)),
    ],
)
def test_what_only_the_host_can_draw(params: SamplingParams) -> None:
    assert MlxScores(mx.zeros((1, 4000))).draw(params, [0.3]) is None


@pytest.mark.parametrize("name", PARAMS)
def test_a_seed_gives_equal_tokens_on_both_runtimes(name: str) -> None:
    """The verdict on a tree, from logits on the device and from the same logits in host memory."""
    parents = np.array([-1, -1, 0, 0, 1, 2, 2, 5], np.int32)
    rng = np.random.default_rng(1)
    longest = 0
    for seed in range(60):
        z = np.repeat(rng.standard_normal((1, 12)) * 2, 9, axis=0).astype(np.float32)
        z += rng.standard_normal(z.shape).astype(np.float32) * 0.1
        tokens = np.array([3, 7, 3, 7, 5, 3, 7, 1], np.int32)
        tokens[:2] = np.argsort(-z[0])[:2]
        tokens[2:4] = np.argsort(-z[1])[:2]
        verdicts = [
            SampleMatching(Sampler(PARAMS[name], 12), CounterRng(seed)).verify(
                Draft(tokens, parents), scores, [1, 2, 3]
            )
            for scores in (MlxScores(mx.array(z)), HostScores(list(z)))
        ]
        assert verdicts[0] == verdicts[1]
        longest = max(longest, len(verdicts[0].path))
    assert longest >= 2
