"""What a race says: over the tokens that both answers share, by their own clocks."""

from __future__ import annotations

from edgespec.chat.tui.race import describe_race
from edgespec.core.protocols import Step


def steps_of(*steps: tuple[float, int]) -> list[Step]:
    """From the seconds and the tokens of each step."""
    return [Step(i, (0,) * n, 0, 0, 0, at_s=at_s) for i, (at_s, n) in enumerate(steps)]


FAST = steps_of((10.0, 1), (11.0, 4), (12.0, 4))
PLAIN = steps_of(*((20.0 + i, 1) for i in range(12)))


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
