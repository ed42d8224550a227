"""The line under an answer."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.answers.summary import summarize

DRAFTED = {
    "reason": "stop",
    "emitted_tokens": 32,
    "drafted_tokens": 20,
    "accepted_tokens": 9,
    "tokens_per_second": 71.26,
    "speedup": 1.314,
}
PLAIN = {"drafted_tokens": 0, "speedup": None}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({}, "32 tokens, 71.3 tok/s, 1.31x plain decoding, 9 of 20 drafted accepted"),
        ({"speedup": None}, "32 tokens, 71.3 tok/s, 9 of 20 drafted accepted"),
        (PLAIN, "32 tokens, 71.3 tok/s"),
        (PLAIN | {"emitted_tokens": 1, "tokens_per_second": None}, "1 token"),
        (PLAIN | {"reason": "length"}, "32 tokens, 71.3 tok/s; cut at its limit"),
        (PLAIN | {"reason": "repetition"}, "32 tokens, 71.3 tok/s; the answer repeats itself"),
        (PLAIN | {"reason": "cancelled"}, "32 tokens, 71.3 tok/s; stopped"),
    ],
)
def test_the_parts_that_are_known_are_told(changed: dict[str, Any], line: str) -> None:
    assert summarize(DRAFTED | changed) == line


def test_drafters_that_drafted_nothing_are_told_of() -> None:
    assert summarize(DRAFTED | PLAIN, may_draft=True).endswith(", plain decoding: drafts would not pay here")
    assert "plain decoding:" not in summarize(DRAFTED, may_draft=True)


def test_an_answer_without_measurements() -> None:
    assert summarize({}) == ""
    assert summarize({"reason": "error"}) == "ended by an error; the text so far is kept"
