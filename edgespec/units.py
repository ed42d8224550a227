"""Formatting of sizes and numbers."""

from __future__ import annotations

import math
import re

GIB = 2**30
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"[+-]?(\d+(\.\d*)?(ns|us|µs|ms|s|m|h))+")
_PART = re.compile(r"(\d+(?:\.\d*)?)(\D+)")


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


def parse_duration(text: str) -> float:
    """Seconds, of a number such as '90' or a duration such as '1h30m'; below 0: `inf`. Raises ValueError."""
    if _DURATION.fullmatch(text):
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))
        return math.inf if text.startswith("-") and seconds else seconds
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        raise ValueError("neither seconds nor a duration such as '10m'")
    return math.inf if seconds < 0 else seconds
