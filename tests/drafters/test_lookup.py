"""The suffix lookup against a search through the whole text, written out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edgespec.core.drafter import Outcome
from edgespec.drafters.ngram import MAX_MATCH, SuffixLookup, continue_from

V = 4
REMEMBERED = 8


def looped(unit: list[int], times: int, end: list[int]) -> list[int]:
    return (unit * times)[:150] + end


_token = st.integers(0, V - 1)
_texts = (
    st.lists(_token, max_size=60)
    | st.lists(st.integers(0, 1), max_size=60)
    | st.builds(looped, st.lists(_token, min_size=1, max_size=9), st.integers(1, 90), st.lists(_token, max_size=4))
    | st.builds(lambda a, b, c: a + b + a + c + a, *[st.lists(_token, max_size=20)] * 3)
)


def common(text: list[int], end: int, tokens: list[int]) -> int:
    """How many tokens before position `end` of `text` equal the last ones of `tokens`, 64 at most."""
    n = 0
    while n < min(MAX_MATCH, end, len(tokens)) and text[end - n - 1] == tokens[-n - 1]:
        n += 1
    return n


def occurrences(text: list[int], gram: list[int]) -> list[int]:
    """Positions after the last eight occurrences of `gram` that have a token of the text after them."""
    return [end for end in range(len(gram), len(text)) if text[end - len(gram) : end] == gram][-REMEMBERED:]


def longest(text: list[int], tokens: list[int]) -> tuple[int, int]:
    """(end, length) of the longest match of the end of `tokens` in `text`, the latest of equals; (0, 0) for none."""
    for n in range(min(5, len(tokens)), 1, -1):
        if ends := occurrences(text, tokens[-n:]):
            length, end = max((common(text, end, tokens), end) for end in ends)
            return end, length
    return 0, 0


def followed(text: list[int]) -> list[tuple[int, int]]:
    """(end, length) after every prefix of the text: a match is followed as long as it is right, then looked up anew."""
    states = [(0, 0)]
    for at, token in enumerate(text):
        end, length = states[-1]
        if length and text[end] == token:
            states.append((end + 1, min(length + 1, MAX_MATCH)))
        else:
            states.append(longest(text[: at + 1], text[: at + 1]))
    return states


def of(text: list[int]) -> SuffixLookup:
    lookup = SuffixLookup()
    lookup.extend(text)
    return lookup


@given(_texts)
@settings(max_examples=120, deadline=None)
def test_follows_the_longest_match(text: list[int]) -> None:
    lookup, states, outcomes = SuffixLookup(), followed(text), []
    for n in range(1, len(text) + 1):
        outcomes += lookup.extend(text[:n])
        assert (lookup.end, lookup.length) == states[n]
    pairs = zip(states, text, strict=False)
    expected = [Outcome(length, text[end] == token) for (end, length), token in pairs if length]
    assert outcomes == expected
    assert lookup.tokens == text


@given(st.lists(st.integers(0, 9), max_size=MAX_MATCH))
@settings(max_examples=120, deadline=None)
def test_is_the_longest_match_of_all_in_a_text_that_repeats_little(text: list[int]) -> None:
    """Where no pair of tokens comes more than eight times, nothing is forgotten, and the latest longest match wins."""
    pairs = [*pairwise(text)]
    assume(all(pairs.count(pair) <= REMEMBERED for pair in pairs))
    lookup = of(text)
    length, end = max(((common(text, end, text), end) for end in range(1, len(text))), default=(0, 0))
    assert (lookup.end, lookup.length) == ((end, length) if length > 1 else (0, 0))


@given(_texts, st.lists(st.integers(0, 12), max_size=30))
@settings(max_examples=100, deadline=None)
def test_in_bursts_is_as_at_once(text: list[int], bursts: list[int]) -> None:
    lookup, whole = SuffixLookup(), SuffixLookup()
    outcomes, at = [], 0
    for burst in [*bursts, len(text)]:
        at = min(at + burst, len(text))
        outcomes += lookup.extend(text[:at])
    assert outcomes == whole.extend(text)
    assert (lookup.end, lookup.length, [*lookup.find_matches()]) == (whole.end, whole.length, [*whole.find_matches()])
    assert lookup.extend(text) == []


@given(_texts, _texts)
@settings(max_examples=120, deadline=None)
def test_a_text_read_at_once_is_looked_up_at_its_end(first: list[int], second: list[int]) -> None:
    """All of it is indexed, as if it had been followed."""
    lookup, text = of(first), first + second
    lookup.read(text)
    assert (lookup.end, lookup.length) == longest(text, text)
    assert (lookup.tokens, [*lookup.find_matches()]) == (text, [*of(text).find_matches()])
    assert lookup.continue_after([*text[:9]], 3) == of(text).continue_after([*text[:9]], 3)


@given(_texts.filter(bool), st.lists(_token, max_size=5), st.integers(0, 80), st.data())
@settings(max_examples=100, deadline=None)
def test_a_continuation_copies_the_text_then_itself(
    text: list[int], more: list[int], n: int, data: st.DataObject
) -> None:
    end = data.draw(st.integers(0, len(text) - 1))
    longer = text + more
    for i in range(n):
        longer.append(longer[end + i])
    lookup = of(text)
    assert continue_from(lookup.tokens, end, n, more) == longer[len(text) + len(more) :]
    assert lookup.tokens == text


@given(_texts, st.lists(_token, max_size=6) | st.lists(_token, min_size=60, max_size=70), st.integers(0, 9))
@settings(max_examples=120, deadline=None)
def test_continue_after_looks_up_the_extended_text(text: list[int], more: list[int], n: int) -> None:
    lookup = of(text)
    end, length = longest(text, text + more)
    found = lookup.continue_after(more, n)
    assert found == ((continue_from(lookup.tokens, end, n, more), length) if length else ([], 0))
    assert (lookup.tokens, lookup.extend(text)) == (text, []), "it was only asked"


@pytest.mark.parametrize(
    ("text", "end", "length"),
    [
        ([1, 2, 3, 4], 0, 0),
        ([1, 2, 1], 0, 0),  # one token is too short a match
        ([1, 2, 9, 1, 2], 2, 2),
        ([1, 2, 8, 1, 2, 9, 1, 2], 5, 2),  # the latest of equals
        ([5, 1, 2, 8, 1, 2, 9, 5, 1, 2], 3, 3),  # the longer one
        ([7, 7, 7, 7], 3, 3),  # into itself
        ([0, 1, 2, 3, 4, 5, 6, 9, 3, 4, 5, 6, 8, 1, 2, 3, 4, 5, 6], 7, 6),  # longer than the longest n-gram
    ],
)
def test_by_hand(text: list[int], end: int, length: int) -> None:
    lookup = of(text)
    assert (lookup.end, lookup.length) == (end, length)


def test_only_the_last_eight_occurrences_are_remembered() -> None:
    gram = [1, 2, 3, 4, 5]
    first = [9, 8, 7, *gram, 6]
    for others, length in ((7, 8), (8, 5)):
        text = first + [token for i in range(others) for token in (*gram, 10 + i)]
        assert of([*text, 20]).continue_after([9, 8, 7, *gram], 1)[1] == length


def test_a_match_counts_as_64_tokens_at_most() -> None:
    text = [*range(100), 200]
    lookup = of(text + text[:90])
    assert (lookup.end, lookup.length) == (90, MAX_MATCH)
    assert lookup.extend(text + text[:91]) == [Outcome(MAX_MATCH, is_right=True)]
    assert (lookup.end, lookup.length) == (91, MAX_MATCH)
    assert lookup.extend([*text, *text[:91], 300]) == [Outcome(MAX_MATCH, is_right=False)]
    assert lookup.length == 0


def test_continue_after_copies_the_added_tokens() -> None:
    assert of([1, 2, 3, 1, 2]).continue_after([3], 6) == ([1, 2, 3, 1, 2, 3], 3)
    assert of([1, 2, 3, 1, 2]).continue_after([4], 6) == ([], 0)
    assert of([]).continue_after([1, 2], 3) == ([], 0)
