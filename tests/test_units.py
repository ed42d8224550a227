"""Numbers as people read them."""

from __future__ import annotations

import pytest

from edgespec.errors import reason_of
from edgespec.units import count, significant


@pytest.mark.parametrize(
    ("value", "three", "four"),
    [(0, "0", "0"), (0.00004, "0.00004", "0.00004"), (0.01234, "0.0123", "0.01234"), (9.876, "9.88", "9.876"),
     (99.96, "100", "99.96"), (1100.2, "1,100", "1,100"), (21803.4, "21,803", "21,803"), (-3.14159, "-3.14", "-3.142")],
)  # fmt: skip
def test_significant_digits_without_an_exponent(value: float, three: str, four: str) -> None:
    assert (significant(value), significant(value, 4)) == (three, four)


def test_one_message_and_several() -> None:
    assert [count(n, "message") for n in (0, 1, 1200)] == ["0 messages", "1 message", "1,200 messages"]


def test_system_errors_are_told_without_their_number() -> None:
    assert reason_of(FileNotFoundError(2, "No such file or directory", "x")) == "No such file or directory"
    assert reason_of(RuntimeError("[Errno 111] Connection refused.")) == "Connection refused"
