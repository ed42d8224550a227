"""The n-gram drafter against a naive search through the text."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Outcome
from edgespec.core.protocols import NO_DRAFT, Budget, Draft, Round
from edgespec.core.scores import HostScores
from edgespec.core.tree import check_draft
from edgespec.drafters.ngram import MAX_MATCH, NgramDrafter, Quotes
from edgespec.drafters.registry import SlotMemory

V = 4
SCORES = HostScores([np.zeros(V, np.float32)])
Path = tuple[int, ...]

_token = st.integers(0, V - 1)
_texts = st.lists(_token, min_size=1, max_size=40) | st.builds(
    lambda unit, times, end: (unit * times)[:60] + end,
    st.lists(_token, min_size=1, max_size=7),
    st.integers(1, 20),
    st.lists(_token, max_size=3),
)
_budgets = st.builds(Budget, st.integers(1, 9), st.integers(1, 12))


def occurrences(tokens: list[int], gram: list[int], known: int) -> list[int]:
    """Positions after the last eight occurrences of `gram` in the first `known` tokens that a token follows."""
    n = len(gram)
    return [end for end in range(n, known) if tokens[end - n : end] == gram][-8:]


def common(tokens: list[int], end: int, suffix: list[int]) -> int:
    n = 0
    while n < min(MAX_MATCH, end, len(suffix)) and tokens[end - n - 1] == suffix[-n - 1]:
        n += 1
    return n


def longest(tokens: list[int], suffix: list[int]) -> tuple[int, int]:
    """(end, length) of the longest match of the end of `suffix` in `tokens`, the latest of equals."""
    for n in range(min(5, len(suffix)), 0, -1):
        if ends := occurrences(tokens, suffix[-n:], len(tokens)):
            length, end = max((common(tokens, end, suffix), end) for end in ends)
            return (end, length) if n == 5 else (ends[-1], n)
    return 0, 0


def follow(tokens: list[int], n_read: int) -> list[tuple[int, int]]:
    """(end, length) after every prefix: a match is followed as long as it is right, then looked up anew.

    Of the first `n_read` tokens, which are read at once, only the last match is followed.
    """
    states = [(0, 0)] * n_read + [longest(tokens[:n_read], tokens[:n_read])]
    for at, token in enumerate(tokens[n_read:], n_read):
        end, length = states[-1]
        if length and tokens[end] == token:
            states.append((end + 1, min(length + 1, MAX_MATCH)))
        else:
            states.append(longest(tokens[: at + 1], tokens[: at + 1]))
    return states


def continuation(tokens: list[int], end: int, n: int) -> list[int]:
    text = list(tokens)
    for i in range(n):  # a match near the end repeats into itself
        text.append(text[end + i])
    return text[len(tokens) :]


def naive_paths(tokens: list[int], budget: Budget, n_read: int) -> dict[Path, float]:
    """The confidence of every path. A tree takes matches, longest and latest first, while it has fewer nodes."""
    last = follow(tokens, n_read)[-1]
    matches = [last] if last[1] else []
    if budget.nodes > budget.depth:
        matches = []
        for n in range(min(5, len(tokens)), 0, -1):
            ends = occurrences(tokens, tokens[-n:], len(tokens))
            matches += [(end, n) for end in reversed(ends) if end not in [each for each, _ in matches]]
    paths: dict[Path, float] = {}
    for end, length in matches:
        if len(paths) >= budget.nodes and budget.nodes > budget.depth:
            break
        found = continuation(tokens, end, budget.depth)
        for i in range(budget.depth):
            path = tuple(found[: i + 1])
            paths[path] = max(paths.get(path, 0.0), length + i / 2)
    return paths


def begin(prompt: list[int]) -> NgramDrafter:
    drafter = NgramDrafter()
    drafter.begin(prompt, None)
    return drafter


def expand(
    drafter: NgramDrafter, tokens: list[int], budget: Budget, tree: DraftTree | None = None
) -> dict[Path, float]:
    """The paths that it proposes."""
    tree = DraftTree() if tree is None else tree
    for _ in drafter.expand(tree, tokens, budget):
        pass
    check_draft(tree.select(range(len(tree))), V + 9)
    return {tuple(tree.path_tokens(node)): votes["ngram"] for node, votes in enumerate(tree.votes) if "ngram" in votes}


def finish(drafter: NgramDrafter, text: list[int], emitted: list[int], draft: Draft = NO_DRAFT) -> list[Outcome]:
    return list(drafter.observe(Round(text, tuple(emitted), draft, (), 0, SCORES)))


@given(_texts, _budgets)
@settings(max_examples=150, deadline=None)
def test_equals_naive_search(tokens: list[int], budget: Budget) -> None:
    found = expand(begin(tokens[:-1]), tokens, budget)
    assert found == naive_paths(tokens, budget, len(tokens) - 1)
    assert max(map(len, found), default=0) <= budget.depth
    assert len(found) < budget.nodes + budget.depth


@given(_texts, st.lists(st.integers(1, 5), max_size=10), _budgets)
@settings(max_examples=100, deadline=None)
def test_grown_round_by_round_equals_from_scratch(tokens: list[int], bursts: list[int], budget: Budget) -> None:
    """Whether or not it was asked in a round."""
    at = 1
    grown = begin(tokens[:at])
    for round_, burst in enumerate(bursts):
        before, at = at, min(at + burst, len(tokens))
        finish(grown, tokens[:at], tokens[before:at])
        if round_ % 2:
            assert expand(grown, tokens[:at], budget) == naive_paths(tokens[:at], budget, 1)


@given(_texts, _texts, _budgets)
@settings(deadline=None)
def test_the_next_generation(first: list[int], second: list[int], budget: Budget) -> None:
    """Another text replaces the last one; one that continues it is only read on."""
    drafter = begin(first)
    expand(drafter, [*first, 0, 1, 0, 1], budget)
    drafter.begin(second, None)
    assert expand(drafter, second, budget) == naive_paths(second, budget, len(second))
    both = second + first
    drafter.begin(both, None)
    assert expand(drafter, both, budget) == naive_paths(both, budget, len(both))
    assert finish(drafter, [*both, 0], [0]) == outcomes(both, [0], len(both))


def outcomes(tokens: list[int], emitted: list[int], n_read: int) -> list[Outcome]:
    """What the match before each emitted token predicted of it."""
    text = [*tokens, *emitted]
    states = follow(text, n_read)
    return [
        Outcome(states[at][1], text[states[at][0]] == text[at]) for at in range(len(tokens), len(text)) if states[at][1]
    ]


@given(
    _texts,
    st.lists(st.lists(_token, min_size=1, max_size=4), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=5),
)
@settings(max_examples=80, deadline=None)
def test_an_outcome_for_every_emitted_token(prompt: list[int], rounds: list[list[int]], asked: list[bool]) -> None:
    """Whether it was asked, another drafted, or nobody; in the round of the token."""
    drafter, text = begin(prompt), list(prompt)
    for emitted, is_asked in zip(rounds, asked, strict=False):
        if is_asked:
            expand(drafter, text, Budget(3, 3))
        draft = NO_DRAFT if is_asked else Draft.chain([7, 7])
        wanted = outcomes(text, emitted, len(prompt))
        text = [*text, *emitted]
        assert finish(drafter, text, emitted, draft) == wanted


def test_the_first_unit_is_one_token() -> None:
    text = [1, 2, *range(3, 40), 1, 2]
    drafter, tree = begin(text), DraftTree()
    assert [len(tree) for _ in drafter.expand(tree, text, Budget(20, 20))] == [1, 9, 17, 20]


def test_paths_of_others_are_continued() -> None:
    """The deepest path of each other drafter, up to the depth that is left; its own match stands beside them."""
    text = [1, 2, 3, 4, 9, 5, 6, 8, 1, 2]
    tree = DraftTree()
    tree.add_chain([9], "model", [0.5])
    tree.add_chain([5, 6], "self", [0.4, 0.4])
    drafter = begin(text)
    found = expand(drafter, text, Budget(4, 4), tree)
    assert found == {
        (3,): 2, (3, 4): 2.5, (3, 4, 9): 3, (3, 4, 9, 5): 3.5,
        (9, 5): 1, (9, 5, 6): 1.5, (9, 5, 6, 8): 2,
        (5, 6, 8): 2, (5, 6, 8, 1): 2.5,
    }  # fmt: skip
    again = expand(drafter, text, Budget(4, 4), tree)
    assert again == found, "asked again after another drafter, it only continues"
    deep = DraftTree()
    deep.add_chain([7, 7, 7, 7], "model", [0.9] * 4)
    assert max(map(len, expand(drafter, text, Budget(4, 4), deep))) == 4


def test_what_tools_have_said_is_quoted() -> None:
    """The longer match counts; a match in quotes has four tokens at least, and grows with what is accepted."""
    quotes = [0, 1, 2, 3, 4, 5, 6, 7, 8]
    memory = SlotMemory(quotes=lambda: quotes)
    drafter, budget = NgramDrafter(memory), Budget(3, 3)
    text = [4, 9, 9, 1, 2, 3, 4]
    drafter.begin(text[:3], None)
    assert expand(drafter, text, budget) == {(5,): 4.0, (5, 6): 4.5, (5, 6, 7): 5.0}
    assert next(iter(expand(drafter, [*text, 5], budget).items())) == ((6,), 5.0)
    drafter.begin(text[:3], None)
    assert expand(drafter, [*text, 6], budget) == {}
    assert expand(drafter, [*text, 6, 4], budget) == {(6,): 1.0, (6, 4): 1.5, (6, 4, 6): 2.0}, "three do not count"
    quotes += [10, 1, 2, 3, 4, 11]
    drafter.begin(text[:3], None)
    assert set(expand(drafter, text, budget)) == {(11,)}, "the latest"
    assert Outcome(4, True) in finish(drafter, [*text, 11], [11])
    quotes.clear()
    drafter.begin(text[:3], None)
    assert set(expand(drafter, text, budget)) == {(9,), (9, 9), (9, 9, 1)}


@given(
    st.lists(st.integers(0, 3), max_size=60), st.integers(0, 60), st.lists(st.integers(0, 3), min_size=1, max_size=20)
)
@settings(max_examples=150, deadline=None)
def test_quotes_that_grow_are_found_as_at_once(tokens: list[int], cut: int, text: list[int]) -> None:
    grown, whole = Quotes(), Quotes()
    grown.read(tokens[:cut])
    grown.read(tokens)
    whole.read(tokens)
    found = grown.continue_text(text, 5)
    assert found == whole.continue_text(text, 5)
    ends = occurrences(tokens, text[-4:], len(tokens)) if len(text) >= 4 else []
    assert found[0] == (tokens[ends[-1] : ends[-1] + 5] if ends else []) and (found[1] >= 4) == bool(ends)
