"""Chi-square tests without scipy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RARE = 4.7534
"""The normal quantile of a size of 1e-6, for tests that draw anew in each run."""


def chi_square(counts: Sequence[int], p: Sequence[float], z: float = 3.0902) -> tuple[float, float]:
    """The statistic of `counts` against the distribution `p`, and its limit (Wilson and Hilferty 1931) at the size of
    the normal quantile `z`, by default 0.001.

    Bins that cannot occur must be empty and count as no degree of freedom.
    """
    seen, distribution = np.asarray(counts, float), np.asarray(p, float)
    assert abs(distribution.sum() - 1) < 1e-9
    assert not seen[distribution == 0].any(), "something happened that has probability zero"
    seen, distribution = seen[distribution > 0], distribution[distribution > 0]
    expected = distribution * seen.sum()
    free = len(distribution) - 1
    limit = free * (1 - 2 / (9 * free) + z * np.sqrt(2 / (9 * free))) ** 3
    return float(((seen - expected) ** 2 / expected).sum()), float(limit)


def assert_follows(counts: Sequence[int], p: Sequence[float]) -> None:
    statistic, limit = chi_square(counts, p)
    assert statistic < limit, f"chi-square {statistic:.1f} over {len(p)} bins, limit {limit:.1f}"
