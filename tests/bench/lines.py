"""Lines of a bench's file."""

from __future__ import annotations

import json
from pathlib import Path

from edgespec.bench.runner import read_records
from edgespec.bench.summary import Summary, summarize

HEADER = {
    "kind": "header", "date": "2026-11-21", "processor": "Xeon", "system": "Linux x86_64",
    "versions": {"edgespec": "0.1.0", "mlx_lm": None}, "files": {"target.gguf": "f4ada450"}, "backend": "llamacpp",
    "model": "python-6m", "draft": None, "threads": 1, "context_size": 2048, "max_tokens": 128, "repeats": 5,
    "label": "",
}  # fmt: skip
COST = {"kind": "cost", "position": 64, "rows": {"1": 0.02, "2": 0.03}, "drafts": {}}

HINDSIGHT = {
    "a": {"plain": 10, "autopilot": 18, "model 3": 12, "ngram 7": 20},
    "b": {"plain": 10, "autopilot": 11, "model 3": 12, "ngram 7": 5},
}


def run(arm: str, prompt: str, speed: float | None, **changes: object) -> dict[str, object]:
    """A line of 11 tokens; keywords replace fields of the run, or of its metrics."""
    metrics: dict[str, object] = {
        "prompt_tokens": 5, "emitted_tokens": 11 if speed else 1, "target_forwards": 10 if speed else 0,
        "drafted_tokens": 0, "accepted_tokens": 0, "tau": None, "acceptance_rate": None, "alpha_by_depth": [],
        "tokens_per_second": speed, "ttft_s": 0.5, "tpot_s": 1 / speed if speed else None, "step_p50_s": None,
        "step_p99_s": None, "prefill_s": 0.4, "draft_s": 0.0, "verify_s": 0.0, "sample_s": 0.0, "commit_s": 0.0,
        "times_plain": None, "cached_tokens": 0, "reasoning_tokens": 0,
    }  # fmt: skip
    line: dict[str, object] = {
        "kind": "run", "arm": arm, "prompt": prompt, "category": "chat", "temperature": 0, "repeat": 0, "warm": False,
        "metrics": metrics, "copied_tokens": 0, "copied_s": 0.0, "bound_s": None, "fork": None,
    }  # fmt: skip
    for name, value in changes.items():
        (metrics if name in metrics else line)[name] = value
    return line


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def summary_of(folder: Path, *runs: dict[str, object]) -> Summary:
    return summarize(read_records(write(folder / "bench.jsonl", HEADER, COST, *runs)))
