"""The scores of the tokens that are in a text."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.engine.events import Scored
from edgespec.engine.shown_scores import ShownScores
from edgespec.text.stream import Piece

WHOLE = [("a", "a", False), ("b", "b", False)]
HELD = [("a", "a", False), ("#", "", True), ("b", "#b", False)]
STOPPED = [("a", "a", False), ("b#", "b", True), ("#", "", True)]
IN_THE_MIDDLE = [("ab", "a", True), ("bc", "", True)]  # the stop string is "bb"
SPLIT = [(b"aE", "a", True), (b"\xf0\x9f", "E", False), (b"\x98\x80E", "\U0001f600", True), (b"ND", "", True)]  # "END"
NO_TEXT = [("<think>", "", False), ("a", "a", False)]


def shown(steps: Sequence[tuple[str | bytes, str, bool]]) -> list[list[str]]:
    scores = ShownScores()
    found = []
    for token, text, holds_text in steps:
        pieces = [Piece(text, "answer", "")] if text else []
        raw = token if isinstance(token, bytes) else token.encode()
        taken = scores.take([Scored(raw, -1.0, ())], pieces, holds_text=holds_text)
        found.append([each.text.decode("utf-8", "replace") for each in taken])
    return found


def test_each_token_is_given_out_when_its_text_is() -> None:
    assert shown(WHOLE) == [["a"], ["b"]]
    assert shown(HELD) == [["a"], [], ["#", "b"]]
    assert shown(STOPPED) == [["a"], ["b#"], []]
    assert shown(IN_THE_MIDDLE) == [["ab"], []]
    assert [len(each) for each in shown(SPLIT)] == [1, 1, 1, 0]
    assert shown(NO_TEXT) == [["<think>"], ["a"]]
