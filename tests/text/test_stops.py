"""Stop strings against a search in the full text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgespec.errors import InvalidRequest
from edgespec.text.tokenizer import MAX_STOP_CHARS, MAX_STOPS, StopStrings

_chunks = st.lists(st.text("ab", max_size=4), max_size=12)
_stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the earliest stop string, and that stop string, the shortest if several start there."""
    found = min(((text.index(s), len(s), s) for s in stops if s in text), default=None)
    return (text, None) if found is None else (text[: found[0]], found[2])


@given(_chunks, _stops)
@example(["abc", "d"], ["abcd", "bc"])
@example(["ab", "c", "x"], ["abcd", "bc"])
@example(["ab", "c"], ["abcd", "bc"])
@example(["aab"], ["ab", "aab", "aabb"])
def test_equals_search_in_full_text(chunks: list[str], stops: list[str]) -> None:
    stream = StopStrings(stops)
    results = [stream.push(chunk) for chunk in chunks]
    last = stream.finish()
    text, stop = search("".join(chunks), stops)
    assert ("".join(results) + last, stream.stop) == (text, stop)


@given(_chunks, _stops, st.text("ab", max_size=6))
def test_nothing_shown_is_taken_back_and_nothing_waits_without_need(
    chunks: list[str], stops: list[str], after: str
) -> None:
    stream, shown, seen = StopStrings(stops), "", ""
    for chunk in chunks:
        shown, seen = shown + stream.push(chunk), seen + chunk
        assert search(seen + after, stops)[0].startswith(shown)
        if stream.stop is not None:
            assert search(seen, stops) == (shown, stream.stop)
            return
        held = seen[len(shown) :]
        assert not held or any(s.startswith(held) and s != held for s in stops)


def test_later_text_is_dropped() -> None:
    stream = StopStrings(["\n\n"])
    assert [stream.push("a\n"), stream.push("\nb"), stream.push("c"), stream.finish()] == ["a", "", "", ""]
    assert stream.stop == "\n\n"


@pytest.mark.parametrize("stops", [[""], ["a", ""], ["x" * (MAX_STOP_CHARS + 1)], ["x"] * (MAX_STOPS + 1)])
def test_limits(stops: list[str]) -> None:
    with pytest.raises(InvalidRequest):
        StopStrings(stops)


def test_limits_are_allowed() -> None:
    stops = ["y" * MAX_STOP_CHARS] * MAX_STOPS
    assert StopStrings(stops).push("x" + stops[0]) == "x"
