"""Functions of draft trees against brute force over child lists, and the checks of check_draft."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.protocols import Draft
from edgespec.core.tree import branches, check_draft, depths, is_path, leaves, path_to

V = 5


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    n = draw(st.integers(0, 9))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    tokens = draw(st.lists(st.integers(0, V - 1), min_size=n, max_size=n))
    return Draft(np.array(tokens, np.int32), np.array(parents, np.int32))


def all_paths(draft: Draft) -> dict[int, tuple[int, ...]]:
    """Node -> the nodes down to it, found from the root."""
    paths: dict[int, tuple[int, ...]] = {}
    frontier: list[tuple[int, tuple[int, ...]]] = [(-1, ())]
    while frontier:
        node, path = frontier.pop()
        for child in range(len(draft)):
            if draft.parents[child] == node:
                paths[child] = (*path, child)
                frontier.append((child, paths[child]))
    return paths


@given(drafts())
def test_shapes(draft: Draft) -> None:
    paths = all_paths(draft)
    nodes = range(len(draft))
    assert sorted(paths) == list(nodes)
    assert [path_to(draft, i) for i in nodes] == [paths[i] for i in nodes]
    assert path_to(draft, -1) == ()
    assert depths(draft).tolist() == [len(paths[i]) for i in nodes]
    for node in (-1, *nodes):
        assert draft.children(node) == [i for i in nodes if draft.parents[i] == node]
    ends = [i for i in nodes if not any(i in path[:-1] for path in paths.values())]
    assert leaves(draft) == ends
    assert branches(draft) == [[b for b, end in enumerate(ends) if i in paths[end]] for i in nodes]
    assert draft.is_chain == all(paths[i] == tuple(range(i + 1)) for i in nodes)


@given(drafts(), st.lists(st.integers(-2, 10), max_size=4))
def test_is_path(draft: Draft, guess: list[int]) -> None:
    valid = {(), *all_paths(draft).values()}
    assert all(is_path(draft, path) for path in valid)
    assert is_path(draft, tuple(guess)) == (tuple(guess) in valid)


@given(drafts())
def test_only_repeated_siblings_need_a_distribution(draft: Draft) -> None:
    pairs = list(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True))
    if len(set(pairs)) == len(pairs):
        check_draft(draft, V)
    else:
        with pytest.raises(ValueError, match="distinct"):
            check_draft(draft, V)
    check_draft(Draft(draft.tokens, draft.parents, np.full((len(draft), V), 1 / V)), V)


def wrong(tokens: list[int], parents: list[int], q_shape: tuple[int, int] | None = None) -> Draft:
    q = None if q_shape is None else np.ones(q_shape)
    return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), q)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (wrong([1, V], [-1, 0]), "token ids"),
        (wrong([-1], [-1]), "token ids"),
        (wrong([1, 2], [-1, 1]), "parents"),
        (wrong([1, 2], [1, -1]), "parents"),
        (wrong([1], [-2]), "parents"),
        (wrong([1, 2], [-1]), "both"),
        (wrong([1], [-1, 0]), "both"),
        (wrong([1, 1], [-1, -1]), "distinct"),
        (wrong([1, 2], [-1, 0], (1, V)), "q must"),
        (wrong([1, 2], [-1, 0], (2, V - 1)), "q must"),
    ],
)
def test_malformed_drafts_are_refused(draft: Draft, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_draft(draft, V)
