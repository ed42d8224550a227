"""The truncations against a plain sort of the row, over thousands of rows with many equal logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from edgespec.core import truncate
from edgespec.core.arrays import Indices, Logits
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.errors import BackendError

SIZES = (1, 2, 63, 64, 65, 300, 1024, 1025, 2560, 4099, 20_000)  # by one pass, by buckets; with columns and without
MARGIN = 3e-6  # of the total mass: where single precision decides


def rows(n: int) -> Iterator[tuple[np.random.Generator, Logits]]:
    """`n` rows: flat, broad, peaked, of few values, all equal, masked."""
    for seed in range(n):
        rng = np.random.default_rng((seed, n))
        z = (rng.standard_normal(rng.choice(SIZES)) * rng.choice([0.0, 0.1, 1, 3, 8])).astype(np.float32)
        if rng.random() < 0.5:
            z = np.round(z * 4) / 4
        if rng.random() < 0.4:
            z[rng.integers(0, len(z), 5)] += np.float32(rng.uniform(0, 25))
        if rng.random() < 0.2:
            z += np.float32(rng.choice([-500, -35, -28, 60, 90, 1000]))
        if rng.random() < 0.3:
            z[rng.random(len(z)) < rng.choice([0.1, 0.9, 0.999])] = -np.inf
            z[rng.integers(len(z))] = z.max() if z.max() > -np.inf else 1.0
        z.setflags(write=False)
        yield rng, z


def by_rank(rank: Indices | Logits) -> Indices:
    """Ids by `rank`, of equal ones the lower first."""
    return np.argsort(rank, kind="stable")


def test_top_k() -> None:
    for rng, z in rows(600):
        k = int(rng.choice([1, 2, 5, 40, len(z), rng.integers(1, len(z) + 1)]))
        best = by_rank(-z)[:k]
        assert truncate.top_k(z, k).tolist() == sorted(best[z[best] > -np.inf].tolist()), (len(z), k)


def shortest(order: Indices, weights: Logits, share: float) -> list[int] | None:
    """The start of `order` that holds `share` of the weights, ascending; None where rounding decides."""
    sums = np.cumsum(weights[order], dtype=np.float64) / weights.sum(dtype=np.float64)
    n = int(np.searchsorted(sums, share)) + 1
    if np.abs(sums - share).min() < MARGIN:
        return None
    return sorted(order[:n].tolist())


def test_nucleus() -> None:
    decided = 0
    for rng, z in rows(600):
        top_p = float(rng.choice([0.0, 0.1, 0.5, 0.9, 0.95, 0.999, rng.random()]))
        weights = np.exp(z - z.max())
        expected = shortest(by_rank(-z), weights, top_p)
        found = truncate.nucleus(z, top_p)
        if expected is not None:
            decided += 1
            assert found.tolist() == expected, (len(z), top_p)
        assert len(found)
    assert decided > 500


def test_typical() -> None:
    """The distance to the entropy is rounded, so ids of nearly the same distance may change places."""
    decided = 0
    for rng, z in rows(600):
        typical_p = float(rng.choice([0.0, 0.2, 0.9, 0.95, rng.random()]))
        weights = np.exp(z - z.max())
        x = np.maximum(z.astype(np.float64) - z.max(), -1e30)
        distance = np.abs((weights * x).sum() / weights.sum(dtype=np.float64) - x)
        order = by_rank(distance)
        expected = shortest(order, weights, typical_p)
        found = truncate.typical(z, typical_p)
        assert len(found)
        if expected is not None:
            n = len(expected)
            near = np.abs(distance - distance[order[n - 1]]) < 1e-5
            if len(np.unique(z[near])) == 1:
                decided += 1
                assert found.tolist() == expected, (len(z), typical_p)
    assert decided > 400


def test_min_p() -> None:
    for rng, z in rows(150):
        least = float(rng.choice([1e-6, 0.05, 0.5, 1.0]))
        expected = [i for i, value in enumerate(z) if value >= z.max() + np.float32(np.log(least))]
        assert truncate.min_p(z, least).tolist() == expected


def test_masks_are_read_at_any_density() -> None:
    rng = np.random.default_rng(0)
    for n in (0, 1, 49, 1000, 5000):
        for density in (0.0, 0.005, 0.03, 0.08, 0.11, 0.5, 1.0):
            mask = rng.random(n) < density
            assert truncate._find(mask).tolist() == np.flatnonzero(mask).tolist()


@pytest.mark.parametrize("truncate", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.9}])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("score", [np.nan, np.inf])
def test_rows_that_hold_no_numbers_are_an_error(score: float, temperature: float, truncate: dict[str, float]) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature, **truncate), 5000)  # type: ignore[arg-type]
    row = np.zeros(5000, np.float32)
    assert sampler.distribution(row, ()).weights.max() > 0
    row[4321] = score
    with pytest.raises(BackendError, match="NaN or infinite logits"):
        sampler.distribution(row, ())


@pytest.mark.parametrize("keep", [lambda z: z, lambda z: np.where(np.arange(len(z)) % 997 == 3, z, -np.inf)])
def test_a_sampler_is_the_same_at_every_call(keep: Callable[[Logits], Logits]) -> None:
    """Its work buffers hold nothing that a later row could see."""
    params = SamplingParams(temperature=0.7, typical_p=0.99, top_p=0.9, min_p=0.01, repetition_penalty=1.3)
    rng, used = np.random.default_rng(2), Sampler(params, 20_000)
    for _ in range(20):
        z = keep(rng.standard_normal(20_000).astype(np.float32) * 4).astype(np.float32)
        prefix = rng.integers(0, 20_000, 30).tolist()
        one, other = used.distribution(z, prefix), Sampler(params, 20_000).distribution(z, prefix)
        assert one.ids is not None and other.ids is not None
        assert one.ids.tolist() == other.ids.tolist() and one.weights.tolist() == other.weights.tolist()
