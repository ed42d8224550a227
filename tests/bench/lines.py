"""Records of a bench."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from edgespec.bench.divergence import Divergence
from edgespec.bench.records import Cost, Header, Run
from edgespec.bench.summary import Summary, summarize
from edgespec.core.metrics import Metrics

HEADER = Header(
    date="2026-11-21", processor="Xeon", system="Linux x86_64", versions={"edgespec": "0.1.0", "mlx_lm": None},
    files={"target.gguf": "f4ada450"}, backend="llamacpp", model="python-6m", draft=None, threads=1, context_size=2048,
    max_tokens=128, repeats=5,
)  # fmt: skip
COST = Cost(64, {1: 0.02, 2: 0.03}, {})
NEAR_TIE, FAULT = Divergence(1, 0.01, 0.03), Divergence(1, 5.0, 0.01)

HINDSIGHT = {
    "a": {"plain": 10, "autopilot": 18, "model 3": 12, "ngram 7": 20},
    "b": {"plain": 10, "autopilot": 11, "model 3": 12, "ngram 7": 5},
}


def run(arm: str, prompt: str, speed: float | None, **changes: Any) -> Run:
    """A run of 11 tokens; keywords replace its fields, or those of its metrics."""
    values: dict[str, Any] = {
        "prompt_tokens": 5, "emitted_tokens": 11 if speed else 1, "target_forwards": 10 if speed else 0,
        "drafted_tokens": 0, "accepted_tokens": 0, "tau": None, "acceptance_rate": None, "alpha_by_depth": (),
        "tokens_per_second": speed, "ttft_s": 0.5, "tpot_s": 1 / speed if speed else None, "step_p50_s": None,
        "step_p99_s": None, "prefill_s": 0.4, "draft_s": 0.0, "verify_s": 0.0, "sample_s": 0.0, "commit_s": 0.0,
        "speedup": None, "cached_tokens": 0, "reasoning_tokens": 0, "category": "chat", "temperature": 0.0,
        "repeat": 0, "bound_s": None, "fork": None,
    }  # fmt: skip
    values |= changes
    metrics = Metrics(**{each.name: values.pop(each.name) for each in fields(Metrics)})
    return Run(arm=arm, prompt=prompt, metrics=metrics, **values)


def summary_of(*runs: Run) -> Summary:
    return summarize([HEADER, COST, *runs])
