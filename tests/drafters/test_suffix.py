"""The suffix drafter over a real memory, against a search written out; and what it learns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.draft_tree import DraftTree
from edgespec.core.protocols import NO_DRAFT, Budget, Round
from edgespec.core.scores import HostScores
from edgespec.drafters.registry import SlotMemory
from edgespec.drafters.suffix import SuffixDrafter
from edgespec.drafters.suffix_rates import SuffixRates, describe
from edgespec.memory.memory import Memory
from edgespec.memory.space import MemorySpace

V = 4
SCORES = HostScores([np.zeros(V, np.float32)])
NUMBERS = count()
FEW = 8  # places that are followed

_texts = st.lists(st.integers(0, V - 1), min_size=1, max_size=30)


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Memory]:
    opened = Memory(tmp_path_factory.mktemp("memory"), "four tokens", 2**24)
    yield opened
    opened.close()


def open_space(memory: Memory, *texts: Sequence[int]) -> MemorySpace:
    """A namespace with `texts` alone."""
    space = memory.space(f"{next(NUMBERS)}")
    for text in texts:
        space.add(list(text), 0, None)
    return space


def start(space: MemorySpace | None, text: Sequence[int]) -> SuffixDrafter:
    drafter = SuffixDrafter(SlotMemory(space))
    drafter.begin(text, None)
    return drafter


def expand(drafter: SuffixDrafter, text: Sequence[int], budget: Budget) -> DraftTree:
    tree = DraftTree()
    for _ in drafter.expand(tree, text, budget):
        pass
    return tree


def find_places(texts: Sequence[Sequence[int]], text: Sequence[int]) -> list[list[int]]:
    """What follows the longest match of the end of `text` in each place of `texts`."""
    for length in range(min(len(text), 32), 0, -1):
        end = list(text[-length:])
        found = [
            list(each[at:]) for each in texts for at in range(length, len(each)) if list(each[at - length : at]) == end
        ]
        if found:
            return found
    return []


@given(st.lists(_texts, min_size=1, max_size=3), _texts)
def test_it_proposes_what_followed_the_longest_match(memory: Memory, texts: list[list[int]], text: list[int]) -> None:
    drafter = start(open_space(memory, *texts), text)
    places = find_places(texts, text)
    chain = expand(drafter, text, Budget(6, 6))
    assert chain.parents == list(range(-1, len(chain) - 1))
    assert any(place[: len(chain)] == chain.tokens for place in places) if places else not len(chain)
    if 0 < len(places) <= FEW:
        tree = expand(drafter, text, Budget(3, 100))
        paths = {tuple(tree.path_tokens(node)) for node in range(len(tree))}
        assert paths == {tuple(place[:n]) for place in places for n in range(1, min(3, len(place)) + 1)}


def test_a_long_text_is_followed_to_its_end(memory: Memory) -> None:
    """Further than is read at a time, and with drafts of 63 tokens."""
    rng = np.random.default_rng(0)
    said = rng.integers(0, V, 700).tolist()
    space, at = open_space(memory, said), 40
    drafter = start(space, said[:at])
    while at < len(said):
        tree = expand(drafter, said[:at], Budget(63, 63))
        assert tree.tokens == said[at : at + 63]
        emitted = tuple(said[at : at + 50])
        at += len(emitted)
        outcomes = drafter.observe(Round(said[:at], emitted, NO_DRAFT, (), 0, SCORES))
        assert outcomes and all(outcome.is_right for outcome in outcomes)


def test_a_text_that_is_found_by_few_tokens_is_followed_token_by_token(memory: Memory) -> None:
    """Little is read after a short match, and more before it runs out."""
    said = list(range(100, 400))
    drafter = start(open_space(memory, said), said[:2])
    for at in range(2, len(said) - 1):
        tree = expand(drafter, said[:at], Budget(20, 20))
        assert tree.tokens == said[at : at + 20]
        drafter.observe(Round(said[: at + 1], (said[at],), NO_DRAFT, (), 0, SCORES))


def test_the_first_unit_is_one_token(memory: Memory) -> None:
    said = list(range(100, 140))
    drafter, tree = start(open_space(memory, said), said[:9]), DraftTree()
    lengths = [len(tree) for _ in drafter.expand(tree, said[:9], Budget(20, 20))]
    assert lengths == [1, 20]


def test_what_it_would_have_said_is_reported(memory: Memory) -> None:
    """With the confidence that the token had in the tree; alternatives too."""
    space = open_space(memory, [0, 1, 2, 3, 0], [0, 1, 2, 1, 1])
    drafter = start(space, [0, 1, 2])
    tree = expand(drafter, [0, 1, 2], Budget(1, 9))
    assert set(tree.tokens) == {3, 1}
    said = {votes["suffix"]: token for token, votes in zip(tree.tokens, tree.votes, strict=True)}
    outcomes = drafter.observe(Round([0, 1, 2, 3], (3,), NO_DRAFT, (), 0, SCORES))
    assert {outcome.confidence: outcome.is_right for outcome in outcomes} == {c: t == 3 for c, t in said.items()}


def test_without_a_memory_it_says_nothing() -> None:
    drafter = start(None, [0, 1, 2])
    assert not len(expand(drafter, [0, 1, 2], Budget(3, 3))) and not len(expand(drafter, [0, 1, 2], Budget(3, 9)))
    assert not drafter.observe(Round([0, 1, 2, 0], (0,), NO_DRAFT, (), 0, SCORES))


def test_rates_are_learned_by_features_and_kept() -> None:
    rates = SuffixRates()
    sure = describe(40, 1, 1, "answer", is_live=True)
    unsure = describe(40, 1, 1, "corpus", is_live=False)
    assert rates.rate(sure) == rates.rate(unsure)
    for _ in range(200):
        rates.learn(unsure, rates.rate(unsure), is_right=False)
        rates.learn(sure, rates.rate(sure), is_right=True)
    assert rates.rate(sure) > 0.9 > 0.1 > rates.rate(unsure)
    again = SuffixRates.load(rates.dump())
    assert again.rate(sure) == rates.rate(sure) and again.rate(unsure) == rates.rate(unsure)
    along = rates.rate_all(sure, 3, 70)
    assert along == [rates.rate(describe(3 + i, 1, 1, "answer", is_live=True)) for i in range(70)]


@pytest.mark.parametrize("data", [None, b"", b"\xff", b"[]", b'{"weights": [1], "steps": [1]}', b'{"weights": {}}'])
def test_damaged_rates_start_anew(data: bytes | None) -> None:
    features = describe(5, 2, 3, "prompt", is_live=False)
    assert SuffixRates.load(data).rate(features) == SuffixRates().rate(features)
