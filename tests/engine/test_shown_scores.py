"""The scores of the tokens that are in a text."""

from __future__ import annotations

from edgespec.engine.events import Scored
from edgespec.engine.shown_scores import ShownScores
from edgespec.text.stream import Piece

WHOLE = [("a", "a", False), ("b", "b", False)]
HELD = [("a", "a", False), ("#", "", True), ("b", "#b", False)]
STOPPED = [("a", "a", False), ("b#", "b", True), ("#", "", True)]
IN_THE_MIDDLE = [("ab", "a", True), ("bc", "", True)]  # the stop string is "bb"
NO_TEXT = [("<think>", "", False), ("a", "a", False)]


def shown(steps: list[tuple[str, str, bool]]) -> list[list[str]]:
    scores = ShownScores()
    found = []
    for token, text, holds_text in steps:
        pieces = [Piece(text, "answer", "")] if text else []
        taken = scores.take([Scored(token.encode(), -1.0, ())], pieces, holds_text=holds_text)
        found.append([each.text.decode() for each in taken])
    return found


def test_each_token_is_given_out_when_its_text_is() -> None:
    assert shown(WHOLE) == [["a"], ["b"]]
    assert shown(HELD) == [["a"], [], ["#", "b"]]
    assert shown(STOPPED) == [["a"], ["b#"], []]
    assert shown(IN_THE_MIDDLE) == [["ab"], []]
    assert shown(NO_TEXT) == [["<think>"], ["a"]]
