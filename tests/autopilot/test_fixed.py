"""FixedLength: who makes the draft, and what is left out of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from edgespec.autopilot.fixed import FixedLength
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter, Outcome
from edgespec.core.protocols import NO_DRAFT, Budget, Draft, Round
from edgespec.core.tree import check_draft, depths
from edgespec.drafters.ngram import NgramDrafter
from tests.autopilot.replay import NO_SCORES

V = 16
TEXT = [1, 2, 3]
LIMIT = Budget(40, 40)


@dataclass
class Paths(Drafter):
    """Proposes `paths`, each token with one confidence; notes what it is asked for."""

    name: str
    paths: Sequence[Sequence[int]] = ()
    sure: float = 0.8
    is_drawn: bool = False
    unread_chain: Draft | None = None
    asked: list[Budget] = field(default_factory=list)
    heard: list[Round] = field(default_factory=list)

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        self.asked.append(limit)
        q = np.full(V, 1 / V) if self.is_drawn else None
        for path in self.paths:
            node = -1
            for token in path[: limit.depth]:
                node = tree.add(node, token, self.name, self.sure, q)
                yield

    def draft_async(self, text: Sequence[int], limit: Budget) -> Draft | None:
        return self.unread_chain

    def observe(self, done: Round) -> Sequence[Outcome]:
        self.heard.append(done)
        return ()


def propose(
    drafters: Sequence[Drafter], budget: Budget, text: Sequence[int] = TEXT, limit: Budget = LIMIT
) -> tuple[Draft, str]:
    """(the draft, its source)"""
    controller = FixedLength(drafters, budget, V)
    controller.begin(text)
    draft = controller.propose(text, limit)
    check_draft(draft, V)
    assert not controller.failures
    return draft, controller.decision.drafter


def test_a_chain_is_the_first_drafters_that_proposes_something() -> None:
    silent, first, second = Paths("silent"), Paths("first", [[5, 6, 7]]), Paths("second", [[8, 9]], 0.99)
    draft, source = propose([silent, first, second], Budget(2, 2))
    assert (draft.tokens.tolist(), draft.is_chain, source) == ([5, 6], True, "first")
    assert (silent.asked, first.asked, second.asked) == ([Budget(2, 2)], [Budget(2, 2)], [])


def test_a_chain_is_the_most_confident_path() -> None:
    class Siblings(Paths):
        def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
            worse = tree.add(-1, 5, self.name, 0.3)
            better = tree.add(-1, 6, self.name, 0.6)
            tree.add(worse, 7, self.name, 1.0)
            tree.add(better, 8, self.name, 0.4)
            tree.add(better, 9, self.name, 0.5)
            yield

    draft, _ = propose([Siblings("model")], Budget(3, 3))
    assert (draft.tokens.tolist(), draft.is_chain) == ([6, 9], True)
    draft, _ = propose([Siblings("model")], Budget(3, 4))
    assert (draft.tokens.tolist(), draft.parents.tolist()) == ([5, 6, 7, 9], [-1, -1, 0, 1])


def test_a_tree_is_all_drafters() -> None:
    first, second = Paths("first", [[5, 6]]), Paths("second", [[5, 7], [8]])
    draft, source = propose([first, second], Budget(2, 6))
    assert draft.tokens.tolist() == [5, 6, 7, 8] and draft.parents.tolist() == [-1, 0, 0, -1]
    assert draft.drafters == ("first+second", "first", "second", "second")
    assert source == "first+second"


@pytest.mark.parametrize("budget", [Budget(1, 1), Budget(3, 3), Budget(2, 3), Budget(2, 9)])
@pytest.mark.parametrize("limit", [Budget(1, 9), Budget(9, 2), Budget(2, 1)])
def test_the_budget_and_the_limit_are_kept(budget: Budget, limit: Budget) -> None:
    drafters = [Paths("first", [[5, 6, 7, 8], [6, 5]]), Paths("second", [[8], [9, 9, 9]])]
    draft, _ = propose(drafters, budget, limit=limit)
    assert 1 <= len(draft) <= min(budget.nodes, limit.nodes)
    assert depths(draft).max() <= min(budget.depth, limit.depth)
    if budget.nodes <= budget.depth:
        assert draft.is_chain


@pytest.mark.parametrize("budget", [Budget(3, 3), Budget(3, 6)])
def test_matches_of_one_token_are_not_drafted(budget: Budget) -> None:
    draft, source = propose([NgramDrafter()], budget, [1, 2, 3, 4, 9, 1, 2])
    assert draft.tokens.tolist()[:3] == [3, 4, 9] and source == "ngram"
    assert propose([NgramDrafter()], budget, [1, 2, 3, 4, 9, 5, 2]) == (NO_DRAFT, "none")
    model = Paths("model", [[7, 7]])
    draft, source = propose([NgramDrafter(), model], budget, [1, 2, 3, 4, 9, 5, 2])
    assert (draft.tokens.tolist(), source) == ([7, 7], "model")


@pytest.mark.parametrize("budget", [Budget(2, 2), Budget(2, 6)])
def test_drawn_tokens_are_verified_alone_and_whole(budget: Budget) -> None:
    drawn = Paths("drawn", [[5, 6, 7]], is_drawn=True)
    draft, source = propose([drawn, Paths("other", [[8, 9]])], budget)
    assert (draft.tokens.tolist(), draft.drafters, source) == ([5, 6], ("drawn", "drawn"), "drawn")
    assert draft.q is not None and draft.q.shape == (2, V)
    draft, source = propose([Paths("silent", is_drawn=True), Paths("other", [[8, 9]])], budget)
    assert (draft.tokens.tolist(), draft.q, source) == ([8, 9], None, "other")


def test_a_chain_that_the_device_still_computes_is_not_read() -> None:
    chain = Draft.chain([5, 6, 7])
    lazy = Paths("lazy", [[8, 9]], unread_chain=chain)
    draft, source = propose([lazy, Paths("other", [[1]])], Budget(3, 3))
    assert draft is chain and source == "lazy" and not lazy.asked
    draft, source = propose([lazy], Budget(3, 4))
    assert (draft.tokens.tolist(), source) == ([8, 9], "lazy"), "a tree needs its probabilities"


@pytest.mark.parametrize("budget", [Budget(0, 0), Budget(3, 0), Budget(0, 3)])
def test_without_a_budget_nothing_is_asked_and_everything_heard(budget: Budget) -> None:
    model = Paths("model", [[5]])
    controller = FixedLength([model], budget, V)
    assert controller.expects_plain
    controller.begin(TEXT)
    assert controller.propose(TEXT, LIMIT) is NO_DRAFT
    done = Round([*TEXT, 4], (4,), NO_DRAFT, (), 0, NO_SCORES)
    controller.observe(done)
    assert (model.asked, model.heard, controller.decision.drafter) == ([], [done], "none")
    assert FixedLength([], Budget(3, 3), V).expects_plain
    controller = FixedLength([model], Budget(3, 3), V)
    assert not controller.expects_plain
    assert controller.propose(TEXT, Budget(0, 0)) is NO_DRAFT and not model.asked
