"""The line under an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.core.metrics import told_speedup

_ENDINGS = {
    "length": "cut at its limit",
    "repetition": "the answer repeats itself",
    "cancelled": "stopped",
    "error": "ended by an error; the text so far is kept",
}


def summarize(metrics: Mapping[str, Any], *, has_drafters: bool = False) -> str:
    """How many tokens an answer has, how fast they came, how many were drafted, and why it ended too early.

    `metrics` has the fields of core.metrics.Metrics that are known, and the `reason`. Empty for an imported answer.
    `has_drafters`: tell if no draft was worth its time.
    """
    ending = _ENDINGS.get(metrics.get("reason", ""), "")
    if "emitted_tokens" not in metrics:
        return ending
    n_tokens, n_drafted = metrics["emitted_tokens"], metrics.get("drafted_tokens") or 0
    parts = [f"{n_tokens} token{'s' if n_tokens != 1 else ''}"]
    if speed := metrics.get("tokens_per_second"):
        parts.append(f"{speed:.1f} tok/s")
    if speedup := told_speedup(metrics.get("times_plain"), n_drafted, n_tokens):
        parts.append(f"{speedup:.2f}x plain decoding")
    if n_drafted:
        parts.append(f"{metrics.get('accepted_tokens')} of {n_drafted} drafted accepted")
    elif has_drafters:
        parts.append("plain decoding: drafts would not pay here")
    return ", ".join(parts) + (f"; {ending}" if ending else "")
