"""Formatting of sizes."""

from __future__ import annotations

GIB = 2**30


def gib(count: int) -> str:
    """Bytes as GiB with one decimal, or MiB below a tenth of a GiB."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:,.1f} MiB"
