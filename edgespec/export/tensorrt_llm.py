"""TensorRT-LLM: `trtllm-serve` with a file of options. Keys: tensorrt_llm/llmapi/llm_args.py, November 2026."""

from __future__ import annotations

import json
from typing import Any

from edgespec.export.plan import Draft, Exported, ExportPlan
from edgespec.export.weights import hint_quantization, name_original, own_or_original, run_on_gpu

METHODS = {
    "model": "Draft_Target", "pard": "PARD", "eagle3": "Eagle3", "mtp": "MTP", "gemma4-assistant": "MTP",
    "dflash": "DFlash", "dspark": "DSpark", "ngram": "NGram", "suffix": "SA",
}  # fmt: skip
FILE = "tensorrt-llm.yml"
_IMAGE, _PORT = "${TENSORRT_LLM_IMAGE:?the release image of TensorRT-LLM, which its documents name}", 8000


def render(plan: ExportPlan, draft: Draft | None, length: int) -> Exported:
    """`trtllm-serve`, which downloads the original weights when it starts."""
    words, files = ["trtllm-serve", name_original(plan.target)], {}
    volumes: list[tuple[str, str]] = []
    if draft is not None:
        files[FILE] = _format_config(describe(plan, draft, length))
        words += ["--config", FILE]
        volumes.append((f"./{FILE}", f"/{FILE}"))
    inside = [f"/{FILE}" if word == FILE else word for word in words]
    container = run_on_gpu(plan, draft, _IMAGE, inside, _PORT, volumes)
    return Exported((tuple(words),), container, files, _list_remarks(plan, draft))


def describe(plan: ExportPlan, draft: Draft, length: int) -> dict[str, Any]:
    """`speculative_config`. Relaxed acceptance and typical acceptance, which are lossy, are never turned on."""
    found: dict[str, Any] = {"decoding_type": METHODS[draft.method], "max_draft_len": length}
    if model := own_or_original(plan, draft):
        found["speculative_model"] = model
    return found


def _format_config(config: dict[str, Any]) -> str:
    return "speculative_config:\n" + "".join(f"  {key}: {json.dumps(value)}\n" for key, value in config.items())


def _list_remarks(plan: ExportPlan, draft: Draft | None) -> tuple[str, ...]:
    remarks = []
    if draft is not None:
        remarks.append(
            "Older releases call the option --extra_llm_api_options, the type DraftTarget, and the key "
            "speculative_model_dir."
        )
    if draft is not None and draft.method == "mtp":
        remarks.append(
            "Older releases have num_nextn_predict_layers in place of max_draft_len. The documents name DeepSeek's "
            "models for MTP: check that this target is among those of your release."
        )
    return (*remarks, *hint_quantization(plan, ""))
