"""mlx-lm, with the MLX folders in use. Options: mlx_lm/server.py of version 0.32.2."""

from __future__ import annotations

from edgespec.errors import InvalidRequest
from edgespec.export.plan import Draft, Exported, ExportPlan, Weights
from edgespec.hub.cache import HubRepo, LocalPath, is_gguf_name

METHODS = {"model": "draft model"}


def render(plan: ExportPlan, draft: Draft | None, length: int) -> Exported:
    """`mlx_lm.server`, which downloads the models when it starts."""
    words = ["mlx_lm.server", "--model", _name(plan.target)]
    if draft is not None and draft.weights is not None:
        words += ["--draft-model", _name(draft.weights), "--num-draft-tokens", str(length)]
    remarks = ["`mlx_lm.generate` takes the same options, and --prompt."]
    if draft is not None:
        remarks.append("With a draft model mlx_lm.server answers one request at a time.")
    return Exported((tuple(words),), remarks=tuple(remarks))


def _name(weights: Weights) -> str:
    """The folder, or the repository. Raises InvalidRequest for a GGUF file, such as the embedded one."""
    if not isinstance(weights.files, HubRepo | LocalPath) or is_gguf_name(str(weights.files)):
        raise InvalidRequest(
            f"mlx-lm loads folders, and {weights.reference} is a GGUF file.",
            hint="Export it to llama-server or ollama.",
        )
    return str(weights.files)
