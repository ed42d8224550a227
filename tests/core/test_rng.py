"""Inverse-CDF drawing against exact sums, and the seeded numbers: uniform, independent, reproducible."""

from __future__ import annotations

from bisect import bisect_right
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgespec.core.rng import CounterRng
from edgespec.core.weights import index_at, sum_blocks
from tests.core.stats import assert_follows

LAST = 1 - 2.0**-53  # the largest number that `uniform` returns
BLOCK = 512

_u = st.integers(0, 2**20 - 1).map(lambda k: k / 2**20) | st.sampled_from([0.0, 2.0**-53, 0.5, LAST])
_small = st.lists(st.integers(0, 3), min_size=1, max_size=40).filter(any)
_sizes = st.sampled_from([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 5000])


def exact_index(weights: list[int], u: float) -> int:
    return bisect_right(list(accumulate(weights)), Fraction(u) * sum(weights))


@given(_small, _u)
@example([0, 0, 1, 0, 0], 0.0)
@example([0, 0, 1, 0, 0], LAST)
def test_small_laws_exactly(weights: list[int], u: float) -> None:
    for dtype in (np.float32, np.float64):
        assert index_at(np.array(weights, dtype), u) == exact_index(weights, u)


@given(_sizes, st.integers(0, 2**32), st.sampled_from([0.001, 0.02, 0.5, 1.0]), _u)
@example(3 * BLOCK, 1, 0.001, 0.0)
@example(3 * BLOCK, 1, 0.001, LAST)
def test_large_laws_exactly_across_blocks(n: int, seed: int, density: float, u: float) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, 9, n) * (rng.random(n) < density)
    weights[rng.integers(n)] += 1
    assert index_at(weights.astype(np.float32), u) == exact_index(weights.tolist(), u)


@given(
    st.lists(st.floats(0, 1, width=32) | st.sampled_from([0.0, 1e-30, 1e-38]), min_size=1, max_size=30).filter(any),
    st.integers(1, 60),
    _u | st.floats(0, LAST),
)
def test_rounding_moves_a_border_by_next_to_nothing(values: list[float], repeat: int, u: float) -> None:
    weights = np.tile(np.array(values, np.float32), repeat)
    i = index_at(weights, u)
    exact = [Fraction(float(w)) for w in weights]
    level, total = Fraction(u) * sum(exact), sum(exact)
    start = sum(exact[:i], Fraction(0))
    assert weights[i] > 0
    assert start - total / 10**12 <= level <= start + exact[i] + total / 10**12


@pytest.mark.parametrize("n", [16_385, 32_256, 100_003])
def test_large_float32_laws_are_off_by_less_than_a_millionth(n: int) -> None:
    """Their blocks are summed in single precision; a draw on the device leaves twenty times that to the host."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        weights = np.exp(rng.standard_normal(n) * rng.choice([0, 1, 3, 8]), dtype=np.float64).astype(np.float32)
        exact = np.cumsum(weights, dtype=np.float64)
        u = float(rng.random())
        i, slack = index_at(weights, u), 1e-6 * exact[-1]
        assert weights[i] > 0 and exact[i] - weights[i] - slack <= u * exact[-1] <= exact[i] + slack
        sums = sum_blocks(weights)
        assert np.abs(np.cumsum(sums)[-1] - exact[-1]) < slack and len(sums) == -(-n // 512)


def test_draws_follow_the_weights() -> None:
    weights = np.zeros(2500)
    weights[[3, 1000, 1023, 1024, 2047, 2048, 2499]] = [1, 2, 3, 4, 5, 6, 7]
    random_source = CounterRng(11)
    drawn = [random_source.choose(weights, position) for position in range(20_000)]
    assert_follows(np.bincount(drawn, minlength=2500).tolist(), (weights / weights.sum()).tolist())


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
def test_positions_of_one_seed_are_uniform_and_independent(seed: int) -> None:
    u = np.array([CounterRng(seed).uniform(position) for position in range(16_001)])
    assert_follows(np.histogram(u, 64, (0, 1))[0].tolist(), [1 / 64] * 64)
    pairs = np.histogram2d(u[:-1], u[1:], 8, ((0, 1), (0, 1)))[0]
    assert_follows(pairs.ravel().astype(int).tolist(), [1 / 64] * 64)


@pytest.mark.parametrize(("p", "q", "rate"), [(0.3, 0.6, 0.5), (0.1, 1.0, 0.1), (1e-5, 1e-5 / 0.7, 0.7)])
def test_accept_at_the_rate_of_p_over_q(p: float, q: float, rate: float) -> None:
    random_source = CounterRng(5)
    accepted = sum(random_source.accept(p, q) for _ in range(10_000))
    assert_follows([accepted, 10_000 - accepted], [rate, 1 - rate])


@given(st.integers(), st.floats(1e-300, 1))
def test_accept_is_certain_at_the_ends(seed: int, q: float) -> None:
    random_source = CounterRng(seed)
    assert not random_source.accept(0.0, q)
    assert random_source.accept(q, q)
    assert random_source.accept(1.0, q)


def test_choose_depends_on_position_alone_and_accept_on_a_stream_of_its_own() -> None:
    weights = np.ones(1000)
    quiet, busy = CounterRng(3), CounterRng(3)
    coins = [busy.accept(0.5, 1.0) for _ in range(50)]
    assert [quiet.choose(weights, i) for i in range(50)] == [busy.choose(weights, i) for i in reversed(range(50))][::-1]
    assert [quiet.accept(0.5, 1.0) for _ in range(50)] == coins
    choices = [quiet.choose(np.ones(2), i) == 1 for i in range(50)]
    assert choices != coins
    assert [CounterRng(4).choose(weights, i) for i in range(50)] != [quiet.choose(weights, i) for i in range(50)]


def test_coins_and_choices_are_independent() -> None:
    cells = [0] * 4
    for seed in range(8000):
        random_source = CounterRng(seed)
        cells[2 * random_source.accept(0.5, 1.0) + random_source.choose(np.ones(2), 0)] += 1
    assert_follows(cells, [0.25] * 4)
