"""The line below an answer, made from the metrics that are stored with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.engine.events import Finished


def footer_metrics(finished: Finished | None) -> dict[str, Any]:
    """The metrics to store with an answer."""
    if finished is None:
        return {"reason": "error"}
    metrics = finished.metrics
    return {
        "reason": finished.reason,
        "seed": finished.seed,
        "emitted_tokens": metrics.emitted_tokens,
        "drafted_tokens": metrics.drafted_tokens,
        "accepted_tokens": metrics.accepted_tokens,
        "tau": metrics.tau,
        "tokens_per_second": metrics.tokens_per_second,
        "times_plain": metrics.times_plain,
        "ttft_s": metrics.ttft_s,
    }


def add_metrics(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of an answer that was generated in two parts. Times are those of the tokens of both."""
    both = (first, second)
    if not all("emitted_tokens" in part for part in both):
        return dict(second)
    seconds = [_seconds(part, part.get("tokens_per_second")) for part in both]
    plain = [_seconds(part, _divide(part.get("tokens_per_second"), part.get("times_plain"))) for part in both]
    counted = ("emitted_tokens", "drafted_tokens", "accepted_tokens")
    counts = {name: first.get(name, 0) + second[name] for name in counted}
    total_s = None if None in seconds else sum(each or 0.0 for each in seconds)
    plain_s = None if None in plain else sum(each or 0.0 for each in plain)
    return {
        **second,
        **counts,
        "ttft_s": first.get("ttft_s"),
        "tau": None,
        "tokens_per_second": _divide(counts["emitted_tokens"], total_s),
        "times_plain": _divide(plain_s, total_s),
    }


def _seconds(part: Mapping[str, Any], speed: float | None) -> float | None:
    return _divide(part["emitted_tokens"], speed)


def _divide(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def format_footer(metrics: Mapping[str, Any]) -> str:
    """Tokens, speed and acceptance in one line, without the parts that are missing; empty for an imported answer."""
    if "emitted_tokens" not in metrics:
        return "ended by an error; the text so far is kept" if metrics.get("reason") == "error" else ""
    parts = [f"{metrics['emitted_tokens']} tokens ({metrics.get('reason', '?')})"]
    speed, times = metrics.get("tokens_per_second"), metrics.get("times_plain")
    if speed:
        parts.append(f"{speed:.1f} tok/s" + (f", {times:.2f}x plain" if times else ""))
    if metrics.get("drafted_tokens"):
        parts.append(f"{metrics.get('accepted_tokens')} of {metrics['drafted_tokens']} drafted accepted")
    return " · ".join(parts)
