"""The n-gram drafter against a naive search through the history."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.toy.session import ToyModel, ToyScores
from edgespec.core.protocols import Budget, Draft, Verdict
from edgespec.core.tree import check_draft, depths, path_to
from edgespec.drafters.ngram import NgramDrafter

V = 4
SCORES = ToyScores(ToyModel(vocab_size=V), ((0,),))

_texts = st.lists(st.integers(0, V - 1), min_size=1, max_size=40) | st.builds(
    lambda unit, times, end: (unit * times)[:60] + end,
    st.lists(st.integers(0, V - 1), min_size=1, max_size=7),
    st.integers(1, 20),
    st.lists(st.integers(0, V - 1), max_size=3),
)
_budgets = st.builds(Budget, st.integers(1, 6), st.integers(1, 12))


def naive_ends(tokens: list[int]) -> list[int]:
    """Positions after an earlier occurrence of the text's last tokens: longest match first, then latest first."""
    ends: list[int] = []
    for n in range(min(5, len(tokens)), 1, -1):
        starts = range(len(tokens) - n)
        found = [i + n for i in starts if tokens[i : i + n] == tokens[-n:]]
        ends += [end for end in reversed(found[-8:]) if end not in ends]
    return ends


def naive_paths(tokens: list[int], budget: Budget) -> list[tuple[int, ...]]:
    """The token paths to every node, in draft order."""
    ends = naive_ends(tokens)
    paths: list[tuple[int, ...]] = []
    for end in ends if budget.nodes > budget.depth else ends[:1]:
        text = list(tokens)
        for i in range(budget.depth):  # a match near the end repeats into itself
            text.append(text[end + i])
        for n in range(1, budget.depth + 1):
            path = tuple(text[end : end + n])
            if path not in paths and len(paths) < budget.nodes:
                paths.append(path)
    return paths


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    return [tuple(draft.tokens[list(path_to(draft, i))].tolist()) for i in range(len(draft))]


def begun(prompt: list[int]) -> NgramDrafter:
    drafter = NgramDrafter()
    drafter.begin(prompt, SCORES)
    return drafter


@given(_texts, _budgets)
@settings(max_examples=400, deadline=None)
def test_equals_naive_search(tokens: list[int], budget: Budget) -> None:
    draft = begun(tokens[:-1]).propose(tokens, budget)
    assert paths_of(draft) == naive_paths(tokens, budget)
    check_draft(draft, V)
    assert len(draft) <= budget.nodes
    assert depths(draft).max(initial=0) <= budget.depth
    assert draft.q is None
    assert draft.is_chain or budget.nodes > budget.depth


@given(_texts, st.lists(st.integers(0, 5), max_size=10), _budgets)
@settings(max_examples=200, deadline=None)
def test_grown_step_by_step_equals_from_scratch(tokens: list[int], bursts: list[int], budget: Budget) -> None:
    at = 1
    grown = begun(tokens[:at])
    for burst in bursts:
        at = min(at + burst, len(tokens))
        draft = grown.propose(tokens[:at], budget)
        assert paths_of(draft) == paths_of(begun(tokens[:at]).propose(tokens[:at], budget))
        grown.observe(Verdict((), 0), SCORES)


@given(_texts, _texts, _budgets)
def test_a_new_generation_forgets_the_last(first: list[int], second: list[int], budget: Budget) -> None:
    drafter = begun(first)
    drafter.propose([*first, 0, 1, 0, 1], budget)
    drafter.begin(second, SCORES)
    assert paths_of(drafter.propose(second, budget)) == naive_paths(second, budget)


@pytest.mark.parametrize(
    ("tokens", "budget", "expected"),
    [
        ([7, 8, 1, 7, 8, 2, 7, 8], Budget(2, 2), [(2,), (2, 7)]),  # the latest of two equal matches
        ([5, 7, 8, 1, 7, 8, 2, 5, 7, 8], Budget(1, 1), [(1,)]),  # the longer match beats the later one
        ([7, 8, 1, 3, 7, 8, 2, 7, 8], Budget(2, 4), [(2,), (2, 7), (1,), (1, 3)]),  # two branches
        ([7, 8, 1, 2, 7, 8, 1, 3, 7, 8], Budget(2, 3), [(1,), (1, 3), (1, 2)]),  # merged where they agree
        ([7, 8, 1, 2, 7, 8, 1, 3, 7, 8], Budget(2, 2), [(1,), (1, 3)]),
        ([1, 2, 3, 4], Budget(4, 4), []),
        ([1, 2, 3, 2], Budget(4, 4), []),  # one token is too short a match
        ([1], Budget(4, 4), []),
    ],
)
def test_by_hand(tokens: list[int], budget: Budget, expected: list[tuple[int, ...]]) -> None:
    assert paths_of(begun(tokens).propose(tokens, budget)) == expected


def test_a_loop_is_drafted_to_the_full_depth() -> None:
    assert begun([1] * 20).propose([1] * 21, Budget(6, 6)).tokens.tolist() == [1] * 6
    assert begun([1, 2, 3] * 4).propose([*[1, 2, 3] * 4, 1], Budget(7, 7)).tokens.tolist() == [2, 3, 1, 2, 3, 1, 2]
