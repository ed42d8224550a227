"""vLLM: `vllm serve` with --speculative-config. Keys: vllm/config/speculative.py of version 0.33.0."""

from __future__ import annotations

import json
from typing import Any

from edgespec.export.plan import Draft, Exported, ExportPlan
from edgespec.export.weights import hint_quantization, name_original, own_or_original, run_on_gpu

METHODS = {
    "model": "draft_model", "pard": "draft_model", "eagle3": "eagle3", "eagle": "eagle", "mtp": "mtp",
    "gemma4-assistant": "mtp", "dflash": "dflash", "dspark": "dspark", "ngram": "ngram", "suffix": "suffix",
}  # fmt: skip
COMPARES = frozenset({"model", "pard"})
MEASURE = "`--per-request-spec-decode-metrics summary` adds the accepted tokens to each response"
_IMAGE, _PORT = "vllm/vllm-openai:v0.33.0", 8000


def render(plan: ExportPlan, draft: Draft | None, length: int) -> Exported:
    """`vllm serve`, which downloads the original weights when it starts."""
    words = ["vllm", "serve", name_original(plan.target)]
    if draft is not None:
        words += ["--speculative-config", json.dumps(describe(plan, draft, length))]
    container = run_on_gpu(plan, draft, _IMAGE, words, _PORT)
    return Exported((tuple(words),), container, remarks=_list_remarks(plan, draft, length))


def describe(plan: ExportPlan, draft: Draft, length: int) -> dict[str, Any]:
    """The object of --speculative-config. The rules that lose exactness are never named in it."""
    found: dict[str, Any] = {"method": METHODS[draft.method], "num_speculative_tokens": length}
    if model := own_or_original(plan, draft):
        found["model"] = model
    if draft.method == "pard":
        found["parallel_drafting"] = True
    if draft.method == "ngram":
        found |= {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
    return found


def _list_remarks(plan: ExportPlan, draft: Draft | None, length: int) -> tuple[str, ...]:
    remarks = []
    if draft is not None and draft.method != "dspark":
        remarks.append(
            "Under load shorter drafts pay: num_speculative_tokens_per_batch_size takes ranges of the batch size, such "
            f"as [[1, 4, {length}], [5, 16, {max(1, length // 2)}]]."
        )
    if draft is not None and draft.method == "suffix":
        remarks.append("The method suffix needs the package arctic-inference.")
    if draft is not None and draft.method in ("dflash", "dspark"):
        remarks.append('If the draft\'s attention is refused, add "attention_backend": "FLASH_ATTN" to the JSON.')
    return (*remarks, *hint_quantization(plan, "--quantization fp8"))
