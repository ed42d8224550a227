"""Formatting of sizes and numbers."""

from __future__ import annotations

import math

GIB = 2**30


def gib(count: int) -> str:
    """Bytes as GiB with one decimal, or MiB below a tenth of a GiB."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:,.1f} MiB"


def count(number: int, noun: str) -> str:
    """'1 message', '2 messages'."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def significant(value: float, digits: int = 3) -> str:
    """`value` with so many significant digits, and all digits before the point; never with an exponent."""
    exponent = math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0
    text = f"{value:,.{max(0, digits - 1 - exponent)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
