"""The line under an answer in the chat: its tokens, speed and drafts, and why it ended too early."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.engine.events import Finished
from edgespec.engine.model_info import ModelInfo
from edgespec.models.short_names import shorten_names

_ENDINGS = {
    "length": "cut at its limit",
    "repetition": "the answer repeats itself",
    "cancelled": "stopped",
    "error": "ended by an error; the text so far is kept",
}


RUNTIMES = {"llamacpp": "llama.cpp", "mlx": "MLX", "toy": "toy"}
_LOOKUPS = ("ngram", "suffix", "recycling")


def name_drafters(draft: str) -> str:
    """ModelInfo.draft in words: 'ngram+suffix+repo/draft' is 'lookups + draft'."""
    names = ["lookups" if name in _LOOKUPS else shorten_names(name) for name in draft.split("+")]
    return " + ".join(dict.fromkeys(names))


def describe_drafts(draft: str, *, is_paused: bool = False) -> str:
    """How a model drafts, in words, by ModelInfo.draft."""
    if draft == "none":
        return "no drafts"
    return f"drafts by {name_drafters(draft)}{' (off)' if is_paused else ''}"


def may_draft(model_info: ModelInfo) -> bool:
    """Whether the autopilot decides about drafts: they are neither missing nor switched off."""
    return bool(model_info.drafters) and not model_info.speculation.is_plain and not model_info.is_paused


def summarize(metrics: Mapping[str, Any], *, may_draft: bool = False) -> str:
    """How many tokens an answer has, how fast they came, how many were drafted, and why it ended too early.

    `metrics` has the fields of core.metrics.Metrics that are known, and the `reason`. Empty for an imported answer.
    `may_draft`: tell if no draft was worth its time.
    """
    ending = _ENDINGS.get(metrics.get("reason", ""), "")
    if "emitted_tokens" not in metrics:
        return ending
    n_tokens, n_drafted = metrics["emitted_tokens"], metrics.get("drafted_tokens") or 0
    parts = [f"{n_tokens} token{'s' if n_tokens != 1 else ''}"]
    if speed := metrics.get("tokens_per_second"):
        parts.append(f"{speed:.1f} tok/s")
    if speedup := metrics.get("speedup") or metrics.get("times_plain"):  # the latter in earlier conversations
        parts.append(f"{speedup:.2f}x plain decoding")
    if n_drafted:
        parts.append(f"{metrics.get('accepted_tokens')} of {n_drafted} drafted accepted")
    elif may_draft:
        parts.append("plain decoding: drafts would not pay here")
    return ", ".join(parts) + (f"; {ending}" if ending else "")


_COUNTED = ("emitted_tokens", "drafted_tokens", "accepted_tokens")
_STORED = (*_COUNTED, "tau", "tokens_per_second", "speedup", "ttft_s")


def sum_metrics(earlier: Mapping[str, Any], finished: Finished | None) -> dict[str, Any]:
    """The metrics to store with an answer. If it continues an `earlier` part, token counts include that part; speeds do
    not.
    """
    if finished is None:
        return {"reason": "error"}
    stored = {name: getattr(finished.metrics, name) for name in _STORED}
    counts = {name: stored[name] + earlier.get(name, 0) for name in _COUNTED}
    return {"reason": finished.reason, "seed": finished.seed, **stored, **counts}
