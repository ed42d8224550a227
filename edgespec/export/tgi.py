"""text-generation-inference: `text-generation-launcher`. Options: launcher/src/main.rs of version 3.3.5."""

from __future__ import annotations

from edgespec.export.plan import Container, Draft, Exported, ExportPlan
from edgespec.export.weights import hint_quantization, name_original, own_or_original

METHODS = {"medusa": "medusa", "ngram": "n-gram", "suffix": "n-gram"}
_IMAGE = "${TGI_IMAGE:?the image of text-generation-inference, which its README names}"
_PORT = 8080
_MAINTENANCE = (
    "text-generation-inference is in maintenance mode: its README recommends vLLM, SGLang, llama.cpp and MLX instead."
)


def render(plan: ExportPlan, draft: Draft | None, length: int) -> Exported:
    """The launcher. Medusa heads are served by the name of their own repository, which names the target."""
    model = name_original(plan.target)
    if draft is not None and draft.method == "medusa":
        model = own_or_original(plan, draft) or model
    words = ["--model-id", model, *(["--speculate", str(length)] if draft is not None else [])]
    volumes = [("huggingface", "/data"), *([(model, model)] if model.startswith("/") else [])]
    container = Container(_IMAGE, (*words, "--port", str(_PORT)), _PORT, tuple(volumes))
    remarks = (_MAINTENANCE, *hint_quantization(plan, "--quantize eetq"))
    return Exported((("text-generation-launcher", *words),), container, remarks=remarks)
