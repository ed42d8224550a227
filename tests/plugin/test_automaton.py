"""The suffix automaton against a naive search, and its drafter by the drafters' contract."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from edgespec_automaton import AutomatonDrafter, SuffixAutomaton
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Outcome
from edgespec.core.protocols import NO_DRAFT, Budget, Round
from edgespec.core.scores import HostScores

texts = st.integers(1, 4).flatmap(lambda v: st.lists(st.integers(0, v - 1), max_size=40))


def find_longest(text: Sequence[int]) -> int:
    """The length of the longest suffix that occurs earlier, by comparing all of them."""
    n = len(text)
    return max((k for k in range(1, n) if any(text[e - k : e] == text[n - k :] for e in range(k, n))), default=0)


def propose(drafter: AutomatonDrafter, text: Sequence[int], depth: int) -> DraftTree:
    tree = DraftTree()
    assert list(drafter.expand(tree, text, Budget(depth, depth))) == [None]
    return tree


def observe(drafter: AutomatonDrafter, text: Sequence[int], n: int) -> Sequence[Outcome]:
    """The outcomes of a round that emitted the last `n` tokens of `text` without a draft."""
    return drafter.observe(Round(text, tuple(text[-n:]), NO_DRAFT, (), 0, HostScores(np.zeros((1, 4), np.float32))))


@given(texts)
def test_the_longest_earlier_match_is_found_after_each_token(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for n, token in enumerate(text, start=1):
        automaton.append(token)
        assert automaton.length == find_longest(text[:n])
        if automaton.length:
            assert automaton.end < n
            assert text[automaton.end - automaton.length : automaton.end] == text[n - automaton.length : n]


@given(texts.filter(len), st.integers(1, 60))
def test_a_continuation_is_what_followed_the_match(text: list[int], n: int) -> None:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    if automaton.length:
        found = automaton.read_continuation(n)
        assert found == (text + found)[automaton.end :][:n]
        assert len(found) == n


def test_a_repeated_match_is_the_latest_one() -> None:
    drafter = AutomatonDrafter()
    text = [1, 2, 7, 1, 2, 8, 1, 2]
    drafter.begin(text[:5], None)
    drafter.begin(text, None)
    assert propose(drafter, text, 1).tokens == [8]


@given(texts.filter(len), st.integers(1, 8))
def test_a_draft_is_a_chain_within_its_budget(text: list[int], depth: int) -> None:
    drafter = AutomatonDrafter()
    drafter.begin(text, None)
    tree, length = propose(drafter, text, depth), find_longest(text)
    assert tree.parents == list(range(-1, depth - 1 if length else -1))
    assert [votes["automaton"] for votes in tree.votes] == [length + i for i in range(len(tree))]


@given(texts.filter(len), texts.filter(len))
def test_it_says_of_each_emitted_token_what_it_would_have_drafted(prompt: list[int], emitted: list[int]) -> None:
    drafter, expected = AutomatonDrafter(), []
    drafter.begin(prompt, None)
    for n, token in enumerate(emitted, start=len(prompt)):
        asked, text = AutomatonDrafter(), (prompt + emitted)[:n]
        asked.begin(text, None)
        tree = propose(asked, text, 1)
        expected += [Outcome(votes["automaton"], tree.tokens[0] == token) for votes in tree.votes]
    assert observe(drafter, prompt + emitted, len(emitted)) == expected
    assert observe(drafter, prompt + emitted, len(emitted)) == []


@given(texts.filter(len), texts.filter(len), texts.filter(len), st.booleans())
def test_a_generation_starts_from_any_text(
    first: list[int], more: list[int], other: list[int], continues: bool
) -> None:
    """From one that continues the last one, from a part of it, from another."""
    drafter, fresh = AutomatonDrafter(), AutomatonDrafter()
    drafter.begin(first, None)
    observe(drafter, first + more, len(more))
    text = first + more + other if continues else other
    drafter.begin(text, None)
    fresh.begin(text, None)
    assert propose(drafter, text, 4).tokens == propose(fresh, text, 4).tokens
    assert observe(drafter, [*text, 0], 1) == observe(fresh, [*text, 0], 1)
