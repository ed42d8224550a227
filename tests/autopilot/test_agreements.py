"""Tokens that several drafters propose, whose rate is learned from all votes; and tokens on which they disagree."""

from __future__ import annotations

import pytest

from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.autopilot.scored_tree import ScoredTree
from edgespec.autopilot.stats import DraftStats, TextStats
from edgespec.core.drafter import Confidence, Drafter

MODEL, NGRAM = "model", "ngram"
LOW, HIGH = 0.15, 0.7  # confidences of the model; 0.14 and 0.72 are their rates before any observation
SHORT = 2.0  # a match, right at a rate of 0.4


class Named(Drafter):
    def __init__(self, name: str, confidence: Confidence = "probability", *, is_free: bool = False) -> None:
        self.name = name
        self.confidence = confidence
        self.is_free = is_free


DRAFTERS = (Named(NGRAM, "length", is_free=True), Named(MODEL), Named("pard"))


def shared() -> DraftStats:
    return DraftStats(Profile({1: 1.0}, {MODEL: DraftCost({1: 0.1}), "pard": DraftCost({1: 0.1, 4: 0.2})}))


def text_stats(draft_stats: DraftStats) -> TextStats:
    stats = TextStats(draft_stats, "greedy")
    for drafter in DRAFTERS:
        stats.drafter(drafter)
    return stats


def test_one_vote_has_the_drafters_rate() -> None:
    stats = text_stats(shared())
    assert stats.rate({MODEL: HIGH}) == pytest.approx(0.72)
    assert stats.rate({NGRAM: SHORT}) == pytest.approx(0.4)
    assert stats.rate({NGRAM: SHORT, MODEL: HIGH}) == pytest.approx(0.72), "the highest of two"


def scored(stats: TextStats) -> ScoredTree:
    """A path of the lookup, then the model beside and below it."""
    scored = ScoredTree(stats.rate)
    scored.tree.add_chain([5, 6, 7], NGRAM, [SHORT, SHORT, SHORT])
    return scored


def test_a_later_vote_changes_all_probabilities_below() -> None:
    stats = text_stats(shared())
    tree = scored(stats)
    assert tree.probabilities == pytest.approx([0.4, 0.16, 0.064])
    assert tree.probability(-1) == 1.0
    tree.tree.add(-1, 5, MODEL, HIGH)
    both = stats.rate({NGRAM: SHORT, MODEL: HIGH})
    assert both != pytest.approx(0.4)
    assert tree.probabilities == pytest.approx([both, both * 0.4, both * 0.16])
    tree.tree.add(-1, 8, MODEL, LOW)
    tree.tree.add(1, 9, MODEL, HIGH)
    lookup, model = beside(0.4, 0.72), beside(0.72, 0.4)
    assert tree.probabilities == pytest.approx([both, both * 0.4, both * 0.4 * lookup, 0.14, both * 0.4 * model])
    tree.tree.add(0, 6, MODEL, LOW)
    second = stats.rate({NGRAM: SHORT, MODEL: LOW})
    expected = [both, both * second, both * second * lookup, 0.14, both * second * model]
    assert tree.probabilities == pytest.approx(expected), "of the node, of those below it, and of no other"
    assert tree.probability(4) == pytest.approx(expected[4])


def beside(p: float, other: float) -> float:
    """The rate of a token of rate `p` beside another drafter's token of rate `other`, by enumeration."""
    alone, others, neither = p * (1 - other), other * (1 - p), (1 - p) * (1 - other)  # both cannot be
    return alone / (alone + others + neither)


@pytest.mark.parametrize("p", [0.2, 0.7, 0.99])
@pytest.mark.parametrize("other", [0.2, 0.7, 0.99])
def test_of_two_drafters_that_disagree_at_most_one_is_right(p: float, other: float) -> None:
    tree = ScoredTree(lambda votes: {"a": p, "b": other}[next(iter(votes))])
    tree.tree.add_chain([5, 6], "a", [0.5, 0.5])
    assert tree.probabilities == pytest.approx([p, p * p])
    tree.tree.add(-1, 7, "b", 0.5)
    own, others = beside(p, other), beside(other, p)
    assert tree.probabilities == pytest.approx([own, own * p, others])
    assert own + others < 1.0
    tree.tree.truncate(2)
    assert tree.probabilities == pytest.approx([p, p * p]), "nobody disagrees any more"


def test_a_drafters_own_tokens_do_not_contest_each_other() -> None:
    rates = {0.5: 0.5, 0.3: 0.3, 4.0: 0.6}
    tree = ScoredTree(lambda votes: rates[max(votes.values())])
    tree.tree.add(-1, 5, MODEL, 0.5)
    tree.tree.add(-1, 6, MODEL, 0.3)
    assert tree.probabilities == pytest.approx([0.5, 0.3])
    tree.tree.add(-1, 7, NGRAM, 4.0)
    assert tree.probabilities == pytest.approx([beside(0.5, 0.6), beside(0.3, 0.6), beside(0.6, 0.5 + 0.3)])
    tree.tree.add(-1, 5, NGRAM, 0.5)
    assert tree.probabilities[0] == pytest.approx(0.5), "both propose it"


def test_the_most_probable_nodes_fill_the_rows() -> None:
    stats = text_stats(shared())
    tree = scored(stats)
    tree.tree.add(-1, 5, MODEL, HIGH)
    tree.tree.add(-1, 8, MODEL, LOW)
    tree.tree.add(0, 9, MODEL, HIGH)
    draft = tree.select(3)  # 6 is right at a rate of 0.16 beside 9
    assert (draft.tokens.tolist(), draft.parents.tolist()) == ([5, 8, 9], [-1, -1, 0])
    assert draft.drafters == ("ngram+model", "model", "model")
    assert len(tree.select(0)) == 0
