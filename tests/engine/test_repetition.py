"""An answer that repeats itself is ended where its request asks for it."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgespec.autopilot.speculation import Speculation
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Request
from edgespec.engine.repetition import ENDLESS, RepetitionDetection, RepetitionDetector
from edgespec.errors import InvalidRequest
from tests.engine.conftest import PLAIN, generate


def repeats(tokens: list[int], detection: RepetitionDetection) -> bool:
    """By the definition: the end is one pattern, often enough and long enough."""
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        for count in range(detection.min_count, len(tokens) // size + 1):
            if size * count < detection.min_tokens:
                continue
            if tokens[-size * count :] == tokens[-size:] * count:
                return True
    return False


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 4), st.integers(1, 4), st.integers(2, 4))
@example([7, *[1, 2, 3] * 9], 1, 4, 4)
@example([1] * 40, 1, 1, 4)
@example([1, 2] * 20, 3, 4, 2)
def test_it_ends_with_the_first_token_that_repeats(tokens: list[int], smallest: int, longest: int, count: int) -> None:
    if smallest > longest:
        smallest, longest = longest, smallest
    detection = RepetitionDetection(longest, count, smallest)
    detector = RepetitionDetector(detection)
    for n, token in enumerate(tokens, 1):
        assert detector.take(token) == repeats(tokens[:n], detection), tokens[:n]


@pytest.mark.parametrize("size", [1, 7, 64, 100])
def test_short_patterns_repeat_for_longer(size: int) -> None:
    """A line of dashes is no reason to end."""
    detector = RepetitionDetector(ENDLESS)
    tokens = [i % size for i in range(1000)]
    ended = next(n for n, token in enumerate(tokens, 1) if detector.take(token))
    assert ended == max(4 * size, 256)


@pytest.mark.parametrize(("longest", "count", "smallest"), [(0, 4, 1), (2, 1, 1), (3, 4, 5), (2, 4, 0), (10**6, 4, 1)])
def test_limits_without_a_meaning_are_refused(longest: int, count: int, smallest: int) -> None:
    with pytest.raises(InvalidRequest, match="repetition_detection"):
        RepetitionDetection(longest, count, smallest)


@pytest.mark.parametrize("speculation", [PLAIN, Speculation(("ngram",), 8, 8)], ids=["plain", "drafted"])
def test_the_answer_ends_with_the_same_token_however_it_is_drafted(engine: Engine, speculation: Speculation) -> None:
    engine.speculation = speculation
    only = SamplingParams(temperature=0, logit_bias=((40, 1000.0),))
    limit = RepetitionDetection(8, 4, min_tokens=21)
    _, finished = generate(engine, Request("def f(", only, max_tokens=60, repetition=limit))
    assert finished.reason == "repetition" and finished.tokens == (40,) * 21
    _, finished = generate(engine, Request("def f(", only, max_tokens=60))
    assert finished.reason == "length" and len(finished.tokens) == 60
