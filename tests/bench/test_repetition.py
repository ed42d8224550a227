"""Which part of a text repeats, and the time of its rounds."""

from __future__ import annotations

import pytest

from edgespec.bench.runner import find_repetition, repetition_speed
from edgespec.core.protocols import Step

PASSAGE = list(range(100, 140))


def round_of(index: int, tokens: list[int], at_s: float) -> Step:
    return Step(index, tuple(tokens), 0, 0, 0, at_s=at_s)


def test_a_passage_of_the_prompt_repeats_from_its_ninth_token_on() -> None:
    found = find_repetition([1, 2, *PASSAGE, 3], [7, *PASSAGE, 9, 10])
    assert found == [False] * 9 + [True] * 32 + [False] * 2


def test_what_is_short_or_new_does_not() -> None:
    assert not any(find_repetition([1, *PASSAGE[:20], 2], [5, *PASSAGE[:20], 6])), "twelve tokens are no stretch"
    assert not any(find_repetition([1, 2, 3], list(range(1000, 1100))))
    assert find_repetition([], []) == []


def test_a_text_may_copy_itself() -> None:
    found = find_repetition([0], PASSAGE + PASSAGE)
    assert found == [False] * (len(PASSAGE) + 8) + [True] * (len(PASSAGE) - 8)


def test_rounds_count_that_begin_in_a_stretch() -> None:
    """Also what the last of them emits behind it, and takes for drafts that are wrong."""
    steps = [
        round_of(0, [7, *PASSAGE[:9]], 0.0),  # the prompt's own round: its time is not known
        round_of(1, PASSAGE[9:20], 1.0),
        round_of(2, PASSAGE[20:39], 3.0),
        round_of(3, [PASSAGE[39], 50], 3.5),
        round_of(4, [51], 9.0),
    ]
    assert repetition_speed([1, *PASSAGE, 2], steps) == (11 + 19 + 2, pytest.approx(3.5))
    assert repetition_speed([1, 2], steps) == (0, 0.0)
    assert repetition_speed([1, 2], []) == (0, 0.0)
