"""What a race says: over the tokens that both answers share, by their own clocks."""

from __future__ import annotations

import pytest

from edgespec.core.protocols import Step
from edgespec.tui.race import LaneClock, describe_race


def clock_of(*steps: tuple[float, int]) -> LaneClock:
    """(seconds, tokens) of each step."""
    clock, first = LaneClock(), 0
    for i, (at_s, n) in enumerate(steps):
        clock.add(Step(i, tuple(range(first, first + n)), 0, 0, 0, at_s=at_s))
        first += n
    return clock


FAST = clock_of((10.0, 1), (11.0, 4), (12.0, 4))
PLAIN = clock_of(*((20.0 + i, 1) for i in range(12)))


def test_the_clock_starts_at_the_first_token() -> None:
    assert [FAST.seconds_to(n) for n in (1, 2, 5, 6, 9)] == [0.0, 1.0, 1.0, 2.0, 2.0]
    assert (FAST.tokens, FAST.seconds) == (9, 2.0)
    with pytest.raises(IndexError):
        FAST.seconds_to(10)


def test_marks_say_how_much_text_some_tokens_were() -> None:
    clock = clock_of((1.0, 1))
    assert clock.characters_of(5) == 0
    clock.mark(4)
    clock.add(Step(1, (1, 2, 3), 2, 2, 2, at_s=2.0))
    clock.mark(10)
    assert [clock.characters_of(n) for n in (0, 1, 3, 4, 9)] == [0, 4, 4, 10, 10]


def test_answers_of_one_length() -> None:
    text = list(range(9))
    assert describe_race(text, text, PLAIN, FAST) == ("4.00x plain over 9 tokens: 4.0 against 1.0 tok/s; the same text")


def test_texts_that_differ_are_compared_over_as_many_tokens_of_both() -> None:
    found = describe_race([*range(5), 7, *range(6)], list(range(9)), PLAIN, FAST)
    assert found == ("4.00x plain over 9 tokens: 4.0 against 1.0 tok/s; the texts differ after token 5 (a near tie)")


def test_one_token_takes_no_time() -> None:
    assert (
        describe_race([5], [5, 6], PLAIN, FAST)
        == "Too short to compare: 1 token; the texts differ after token 1 (a near tie)"
    )
    assert describe_race([5], [5], PLAIN, FAST) == "Too short to compare: 1 token; the same text"
