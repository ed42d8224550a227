"""The index against a search through all positions."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.memory.segments import Segment, build_segment, encode_end, find_longest, join_texts, sort_positions
from edgespec.memory.texts import MAX_MATCH, Keys, Origin, StoredText

NO_KEYS: Keys = np.zeros(0, np.uint64)


def make_text(tokens: list[int], n_lead: int = 0, answer: int = 0) -> StoredText:
    return StoredText(np.array(tokens, np.uint32), n_lead, answer, Origin(None, 0.0), NO_KEYS)


def index(texts: list[list[int]]) -> Segment:
    return Segment(build_segment([make_text(text) for text in texts]))


def search(texts: list[list[int]], query: list[int]) -> tuple[int, list[list[int]]]:
    """(length of the longest match, what follows it at each place, the latest place first), written out."""
    best, found = 0, list[list[int]]()
    for text in texts:
        for end in range(1, len(text)):
            length = 0
            while length < min(end, len(query), MAX_MATCH) and text[end - length - 1] == query[-length - 1]:
                length += 1
            if length > best:
                best, found = length, []
            if length == best and length:
                found.append(text[end:])
    return best, found[::-1]


def check(segments: list[Segment], texts: list[list[int]], query: list[int]) -> None:
    length, found = search(texts, query)
    matches = find_longest(segments, encode_end(query), 1000)
    if not length:
        assert matches is None
        return
    assert matches is not None
    assert matches.length == length
    assert [place.read(1000) for place in matches.places] == found


def test_all_small_texts_and_queries() -> None:
    """Every pair of texts of up to four tokens 0 and 1, and every query of up to three."""
    words = [list(word) for n in range(1, 5) for word in product((0, 1), repeat=n)]
    queries = [list(word) for n in range(4) for word in product((0, 1, 2), repeat=n)]
    for i, first in enumerate(words):
        texts = [first, words[(7 * i + 3) % len(words)]]
        segment = index(texts)
        for query in queries:
            check([segment], texts, query)


texts_of_few_tokens = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=80), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(texts_of_few_tokens, st.integers(0, 6), st.lists(st.integers(0, 4), max_size=40), st.data())
def test_matches_across_segments(texts: list[list[int]], split: int, query: list[int], data: st.DataObject) -> None:
    segments = [index(part) for part in (texts[:split], texts[split:]) if part]
    check(segments, texts, query)
    text = data.draw(st.sampled_from(texts))
    check(segments, texts, text[: data.draw(st.integers(0, len(text)))])


@pytest.mark.parametrize("period", [1, 2, 33])
def test_repetitive_texts(period: int) -> None:
    """A match of more than MAX_MATCH tokens counts as that long, and all its places are found."""
    text = list(range(period)) * (200 // period)
    check([index([text])], [text], text[:150])


def test_the_order_is_that_of_the_tokens_before_each_position() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 2, 50):
        tokens = join_texts([rng.integers(0, 3, n).astype(np.uint32)])
        before = [tuple(tokens[max(0, i - MAX_MATCH) : i][::-1].tolist()) for i in range(len(tokens))]
        assert sort_positions(tokens).tolist() == sorted(range(len(tokens)), key=lambda i: (before[i], i))


def test_the_latest_places_are_kept() -> None:
    segment = index([[1, 2, i] for i in range(3, 60)])
    matches = find_longest([segment], encode_end([1, 2]), 5)
    assert matches is not None and matches.length == 2
    assert [place.read(9) for place in matches.places] == [[i] for i in (59, 58, 57, 56, 55)]
