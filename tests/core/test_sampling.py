"""The sampler chain against a slow reference in double precision, stage by stage and as a whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edgespec.core.sampling import Distribution, Sampler, SamplingParams
from edgespec.errors import InvalidRequest

NO = -math.inf


class TooClose(Exception):
    """A truncation border so near to a token that single and double precision may disagree."""


def reference(logits: Sequence[float], params: SamplingParams, prefix: Sequence[int]) -> list[float]:
    """The distribution as the module's docstring orders it; raises TooClose where rounding would decide."""
    z = [float(x) for x in logits]
    for token, bias in params.logit_bias:
        z[token] += bias
    recent = list(prefix)[-params.penalty_window :] if params.penalty_window else []
    for token in set(recent):
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
        z[token] -= params.frequency_penalty * recent.count(token) + params.presence_penalty
    if params.temperature == 0:
        return [float(i == z.index(max(z))) for i in range(len(z))]
    ids = sorted(range(len(z)), key=lambda i: (-z[i], i))
    if params.top_k:
        ids = ids[: params.top_k]
    if params.typical_p < 1:
        p = softmax(z, ids)
        entropy = -sum(p[i] * math.log(p[i]) for i in ids if p[i] > 0)
        distance = {i: abs(-math.log(p[i]) - entropy) if p[i] > 1e-300 else math.inf for i in ids}
        ids = take(sorted(sorted(ids), key=lambda i: distance[i]), p, params.typical_p, distance)
    if params.top_p < 1:
        p = softmax(z, ids)
        ids = take(sorted(ids, key=lambda i: (-p[i], i)), p, params.top_p, {i: z[i] for i in ids})
    if params.min_p > 0:
        border = max(z[i] for i in ids) + math.log(params.min_p)
        if any(0 < abs(z[i] - border) < 1e-4 for i in ids):
            raise TooClose
        ids = [i for i in ids if z[i] >= border]
    p = softmax([x / params.temperature for x in z], ids)
    return [p.get(i, 0.0) for i in range(len(z))]


def softmax(z: Sequence[float], ids: Sequence[int]) -> dict[int, float]:
    top = max(z[i] for i in ids)
    weights = {i: math.exp(z[i] - top) for i in ids}
    total = math.fsum(weights.values())
    return {i: w / total for i, w in weights.items()}


def take(order: Sequence[int], p: dict[int, float], mass: float, rank: dict[int, float]) -> list[int]:
    """The shortest start of `order` that holds `mass`."""
    for n in range(1, len(order) + 1):
        held = math.fsum(p[i] for i in order[:n])
        if abs(held - mass) < 1e-5:
            raise TooClose
        if held > mass:
            if n < len(order) and 0 < abs(rank[order[n - 1]] - rank[order[n]]) < 1e-4:
                raise TooClose
            return list(order[:n])
    return list(order)


# Multiples of 1/4 and powers of two stay exact through bias and penalties, so equal logits stay equal.
_logit = st.integers(-40, 40).map(lambda i: i / 4) | st.sampled_from([NO, -1e30, 1e30, 0.0, 1.0])
_logits = st.lists(_logit, min_size=1, max_size=12).filter(lambda z: max(z) > NO)
_quarter = st.integers(-8, 8).map(lambda i: i / 4)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[float], SamplingParams, list[int]]:
    z = draw(_logits)
    token = st.integers(0, len(z) - 1)
    bias = draw(st.dictionaries(token, _quarter, max_size=3)) if draw(st.booleans()) else {}
    plain: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.0, 0.05, 0.5, 0.7, 1.0, 1.5, 100.0])),
        "top_k": draw(st.sampled_from([0, 0, 1, 2, 3, 5, 11, 12, 40])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.0, 0.3, 0.9]) | st.floats(0, 1)),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0])),
        "typical_p": draw(st.sampled_from([1.0, 1.0, 1.0, 0.2, 0.9])),
        "logit_bias": tuple(bias.items()),
    }
    if draw(st.booleans()):
        plain |= {
            "repetition_penalty": draw(st.sampled_from([0.5, 1.0, 2.0])),
            "presence_penalty": draw(_quarter),
            "frequency_penalty": draw(_quarter),
            "penalty_window": draw(st.sampled_from([0, 1, 3, 64])),
        }
    return z, SamplingParams(**plain), draw(st.lists(token, max_size=8))


def distribution(z: Sequence[float], params: SamplingParams, prefix: Sequence[int] = ()) -> Distribution:
    logits = np.array(z, np.float32)
    logits.setflags(write=False)
    return Sampler(params, len(z)).distribution(logits, prefix)


def probabilities(z: Sequence[float], params: SamplingParams, prefix: Sequence[int] = ()) -> list[float]:
    result: list[float] = distribution(z, params, prefix).dense(len(z)).tolist()
    return result


@given(requests())
@settings(max_examples=200, deadline=None)
def test_whole_chain(request: tuple[list[float], SamplingParams, list[int]]) -> None:
    z, params, prefix = request
    try:
        expected = reference(z, params, prefix)
    except TooClose:
        assume(False)
    found = probabilities(z, params, prefix)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-7)
    if params.temperature > 0.05:
        assert [p > 1e-30 for p in found] == [p > 1e-30 for p in expected], "the same tokens survive"


@given(requests(), st.integers(0, 3))
@settings(deadline=None)
def test_only_the_window_of_the_prefix_matters(request: tuple[list[float], SamplingParams, list[int]], n: int) -> None:
    z, params, prefix = request
    window = Sampler(params, len(z)).window
    shorter = prefix[-window:] if window else []
    assert probabilities(z, params, prefix) == probabilities(z, params, shorter)
    assert probabilities(z, params, [0] * n + prefix[-window:]) == probabilities(z, params, shorter) or window > len(
        prefix
    )


@given(requests())
@settings(deadline=None)
def test_greedy_rows_are_their_argmax(request: tuple[list[float], SamplingParams, list[int]]) -> None:
    z, params, prefix = request
    row_params = Sampler(params, len(z)).row_params
    if row_params is not None and params.temperature == 0:
        assert probabilities(z, params, prefix)[z.index(max(z))] == 1
    elif params.temperature == 0:
        assert params.logit_bias or params.has_penalties


def kept(z: Sequence[float], **params: Any) -> list[int]:
    return [i for i, p in enumerate(probabilities(z, SamplingParams(**params))) if p > 0]


@pytest.mark.parametrize(
    ("z", "params", "expected"),
    [
        ([1, 3, 3, 3, 2], {"top_k": 2}, [1, 2]),
        ([3, 1, 3, 2, 3], {"top_k": 3}, [0, 2, 4]),
        ([0, 0, 0, 0], {"top_p": 0.5}, [0, 1]),
        ([0, 0, 0, 0], {"top_p": 0.5 + 1e-6}, [0, 1, 2]),
        ([0, 5, 5, 1], {"top_p": 0.0}, [1]),
        ([0, 0, 0], {"top_p": 0.0}, [0]),
        ([0, 0, 0, 0], {"typical_p": 0.25}, [0]),
        ([2, 2, NO, 1], {"min_p": 1.0}, [0, 1]),
        ([1, 1, 1], {"temperature": 0.0}, [0]),
        ([NO, 4, NO], {"top_k": 2}, [1]),
        ([2, 1, 3], {"top_k": -1}, [0, 1, 2]),
        ([1e30, 1e30, -1e30], {}, [0, 1]),
        ([7.0], {"top_k": 1, "top_p": 0.1, "min_p": 0.5, "typical_p": 0.1}, [0]),
    ],
)
def test_ties_go_to_the_lower_id(z: list[float], params: dict[str, Any], expected: list[int]) -> None:
    assert kept(z, **params) == expected


_RANGES = {
    "temperature": (0.0, 100.0),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "penalty_window": (0, 2**31 - 1),
}


@pytest.mark.parametrize("name", _RANGES)
def test_values_out_of_range_raise(name: str) -> None:
    low, high = _RANGES[name]
    for value in (low, high):
        probabilities([1.0, 2.0], SamplingParams(**{name: value}), [0])
    for value in (math.nan, math.inf, -math.inf, low - 1, high + 1):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{name: value})
        assert "must be between" in caught.value.message


@pytest.mark.parametrize("bias", [((0, math.nan),), ((0, math.inf),), ((0, -1e5),)])
def test_bad_biases_are_refused(bias: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(InvalidRequest):
        SamplingParams(logit_bias=bias)


@pytest.mark.parametrize("token", [-1, 3, 2**40])
def test_biases_of_unknown_tokens_raise(token: int) -> None:
    with pytest.raises(InvalidRequest, match="vocabulary"):
        Sampler(SamplingParams(logit_bias=((0, 1.0), (token, 1.0))), 3)


VOCABULARY = (np.random.default_rng(8).standard_normal(128_256) * 3).astype(np.float32)


@pytest.mark.parametrize("top_k", [1, 40])
def test_a_real_vocabulary(top_k: int) -> None:
    params = SamplingParams(temperature=0.7, top_k=top_k, top_p=0.913, min_p=0.01, repetition_penalty=2.0)
    z, prefix = VOCABULARY.tolist(), list(range(50, 100))
    np.testing.assert_allclose(probabilities(z, params, prefix), reference(z, params, prefix), rtol=1e-3, atol=1e-9)
