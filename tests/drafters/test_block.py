"""BlockDrafter: the most probable paths of independent positions, against all of them; and drawn chains."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.core.arrays import Logits
from edgespec.core.draft_tree import DraftTree
from edgespec.core.protocols import Budget
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.drafters.block import BlockDrafter
from edgespec.drafters.candidates import RequestDraw, best_tokens

V = 6
TEXT = [1, 2, 3]


class Rows:
    """A BlockSession of given positions."""

    block_size = 8

    def __init__(self, rows: list[Logits] | None) -> None:
        self._rows = rows
        self.asked: list[tuple[int, int]] = []
        self.is_closed = False

    def begin(self, text: Sequence[int]) -> None: ...

    def pending_tokens(self, text: Sequence[int]) -> int:
        return len(text)

    def block(self, text: Sequence[int], window: int, n: int) -> list[Logits] | None:
        self.asked.append((window, n))
        return None if self._rows is None else self._rows[:n]

    def close(self) -> None:
        self.is_closed = True


def make_rows(seed: int, n: int, sharpness: float = 1.5) -> list[Logits]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(V) * sharpness).astype(np.float32) for _ in range(n)]


def expand(drafter: BlockDrafter, limit: Budget) -> tuple[DraftTree, int]:
    tree = DraftTree()
    return tree, sum(1 for _ in drafter.expand(tree, TEXT, limit))


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 20))
@settings(deadline=None)
def test_the_most_probable_paths_and_the_best_chain(seed: int, depth: int, nodes: int) -> None:
    rows = make_rows(seed, depth)
    drafter = BlockDrafter("block", Rows(rows))
    drafter.begin(TEXT, None)
    tree, units = expand(drafter, Budget(depth, nodes))
    candidates = [dict(zip(*best_tokens(row), strict=True)) for row in rows]
    paths = {
        path: prod(candidates[i][token] for i, token in enumerate(path))
        for n in range(1, depth + 1)
        for path in product(*candidates[:n])
    }
    chain = [max(each, key=lambda token: each[token]) for each in candidates]
    best = sorted(paths, key=lambda path: (-paths[path], len(path)))[:nodes]
    wanted = {*best, *(tuple(chain[: n + 1]) for n in range(depth))}
    found = {tuple(tree.path_tokens(node)): votes["block"] for node, votes in enumerate(tree.votes)}
    assert units == 1
    assert {*found} == wanted
    for path, confidence in found.items():
        assert confidence == pytest.approx(candidates[len(path) - 1][path[-1]])
    assert tree.path_tokens(depth - 1) == chain, "first of all"


@given(st.integers(0, 10**6), st.integers(1, 5))
@settings(deadline=None)
def test_drawn_chains(seed: int, depth: int) -> None:
    """Every position is drawn with penalties for the tokens before it, and carries its distribution."""
    sampler, rows = Sampler(SamplingParams(presence_penalty=0.8, penalty_window=4), V), make_rows(seed, depth)
    drafter = BlockDrafter("block", Rows(rows))
    drafter.begin(TEXT, RequestDraw(sampler, np.random.default_rng(seed)))
    assert drafter.is_drawn
    draft = expand(drafter, Budget(depth, depth))[0].drawn()
    assert len(draft) == depth and draft.q is not None
    again, prefix = RequestDraw(sampler, np.random.default_rng(seed)), list(TEXT)
    for token, q, row in zip(draft.tokens.tolist(), draft.q, rows, strict=True):
        assert q.tolist() == sampler.distribution(row, prefix).dense(V).tolist()
        assert token == again.draw(row, prefix)[0]
        prefix.append(token)
    drafter.begin(TEXT, None)
    assert not drafter.is_drawn


def test_no_more_positions_than_the_block_has() -> None:
    session = Rows(make_rows(1, 20))
    drafter = BlockDrafter("block", session)
    assert drafter.block_size == 8
    drafter.begin(TEXT, None)
    tree, _ = expand(drafter, Budget(12, 12, 5))
    assert max(tree.depths) == 8
    expand(drafter, Budget(2, 2))
    assert session.asked == [(5, 8), (3, 2)]


def test_a_session_that_cannot_draft_proposes_nothing() -> None:
    session = Rows(None)
    drafter = BlockDrafter("block", session)
    drafter.begin(TEXT, None)
    tree, units = expand(drafter, Budget(3, 3))
    assert (len(tree), units) == (0, 0)
    drafter.close()
    assert session.is_closed
