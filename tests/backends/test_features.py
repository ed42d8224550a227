"""Hidden states that are kept for a head: appended, dropped, taken, released."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.features import Features

_calls = st.lists(
    st.tuples(st.sampled_from(["append", "truncate", "release"]), st.integers(0, 12), st.integers(0, 40)), max_size=30
)


@given(_calls)
@settings(max_examples=200, deadline=None)
def test_they_are_those_of_a_list(calls: list[tuple[str, int, int]]) -> None:
    """Rows of a list by position; released ones are None."""
    features: Features[np.ndarray] = Features(np.concatenate)
    rows: list[float | None] = []
    value = 0.0
    for name, n, position in calls:
        if name == "append":
            new = [value + i for i in range(n)]
            value += n
            features.append(np.array(new)[:, None], n)
            rows += new
        elif name == "truncate":
            features.rewind(position)
            del rows[position:]
        else:
            features.release(position)
            rows[:position] = [None] * min(position, len(rows))
        assert features.end == len(rows)
        kept = [row for row in rows[features.start :] if row is not None]
        assert len(kept) == features.end - features.start
        if kept:
            assert features.take(features.start, features.end).ravel().tolist() == kept
            middle = (features.start + features.end) // 2
            assert features.take(middle, features.end).ravel().tolist() == kept[middle - features.start :]
    with pytest.raises(ValueError, match="not among those kept"):
        features.take(features.start, features.end + 1)


def test_no_more_than_the_last_ones_are_kept() -> None:
    features: Features[np.ndarray] = Features(np.concatenate)
    for chunk in range(10):
        features.append(np.full((512, 1), chunk), 512)
    assert (features.start, features.end) == (5120 - 2048, 5120)
    assert (
        features.take(features.start, features.end).ravel().tolist()
        == [6.0] * 512 + [7.0] * 512 + [8.0] * 512 + [9.0] * 512
    )
