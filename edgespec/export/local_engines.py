"""llama-server, mlx-lm and Ollama, which load the files in use."""

from __future__ import annotations

import re

from edgespec.drafters.registry import LOOKUPS
from edgespec.errors import InvalidRequest
from edgespec.export.engine import MODELFILE
from edgespec.export.plan import Draft, ExportPlan, Weights
from edgespec.models.file_selection import parse_quant
from edgespec.models.references import HubFile, HubQuant, HubReference, HubRepo, LocalPath, is_gguf_name


def _name_on_hub(files: HubReference) -> str:
    """`user/repo` or `user/repo:QUANT`, without a revision, which these engines do not take."""
    match files:
        case HubFile(repo, file):
            return f"{repo}:{parse_quant(file)}"
        case HubQuant(repo, quant):
            return f"{repo}:{quant}"
    return files.repo


def llama_target(plan: ExportPlan, _draft: Draft | None) -> list[str]:
    match plan.target.files:
        case LocalPath(path):
            return ["--model", str(path)]
        case HubFile(repo, file):
            return ["--hf-repo", repo, "--hf-file", file]
        case files:
            return ["--hf-repo", _name_on_hub(files)]


def llama_options(plan: ExportPlan, draft: Draft, length: int) -> list[str]:
    words: list[str] = []
    match draft.weights.files if draft.weights is not None else None:
        case LocalPath(path):
            words = ["--spec-draft-model", str(path)]
        case HubFile() | HubQuant() | HubRepo() as files:
            words = ["--spec-draft-hf", _name_on_hub(files)]
    beside = [each.method for each in plan.drafts if each.method in LOOKUPS and each is not draft]
    words += ["--spec-type", ",".join(LLAMA_METHODS[method] for method in (*beside, draft.method))]
    return words if draft.method in LOOKUPS else [*words, "--spec-draft-n-max", str(length)]


def refuse_for_llama(draft: Draft) -> str | None:
    """Why a draft cannot be loaded: llama-server downloads those that are not here by their quantization alone."""
    files = draft.weights.files if draft.weights is not None else None
    if isinstance(files, HubFile) and ("/" in files.path or parse_quant(files.path) is None):
        return "llama-server cannot download this file; run `edgespec pull` first"
    return None


def mlx_name(target: Weights) -> str:
    """The folder, or the repository. Raises InvalidRequest for a GGUF file, such as the embedded one."""
    if not isinstance(target.files, HubRepo | LocalPath) or is_gguf_name(str(target.files)):
        raise InvalidRequest(
            f"mlx-lm loads folders, and {target.reference} is a GGUF file.",
            hint="Export it to llama-server or ollama.",
        )
    return str(target.files.path) if isinstance(target.files, LocalPath) else target.files.repo


def mlx_options(plan: ExportPlan, draft: Draft, length: int) -> list[str]:
    assert draft.weights is not None
    return ["--draft-model", mlx_name(draft.weights), "--num-draft-tokens", str(length)]


def write_modelfile(plan: ExportPlan, draft: Draft | None, length: int) -> dict[str, str]:
    """The Modelfile, by its file name. Ollama runs a file named by DRAFT as an MTP layer, or as a DFlash head if that
    is its architecture. An ordinary draft model or an EAGLE-3 head would be taken for the former, so neither is
    exported.

    Raises InvalidRequest for paths that no Modelfile holds.
    """
    match plan.target.files:
        case LocalPath(path):
            lines = [f"FROM {path}"]
        case HubFile(repo, file):
            lines = [f"FROM hf.co/{repo}:{parse_quant(file) if '/' in file else file}"]
        case files:
            lines = [f"FROM hf.co/{_name_on_hub(files)}"]
    if draft is not None and draft.weights is not None:
        lines.append(f"DRAFT {draft.weights.files}")
    if draft is not None:
        lines.append(f"PARAMETER draft_num_predict {length}")
    if any(not line.isprintable() for line in lines):
        raise InvalidRequest("a Modelfile cannot name a file with a line break in its path.", hint="Rename it.")
    return {MODELFILE: "".join(f"{line}\n" for line in lines)}


def name_for_ollama(plan: ExportPlan) -> str:
    stem = plan.name.rsplit("/", 1)[-1].lower().removesuffix(".gguf")
    return re.sub(r"[^a-z0-9._-]+", "-", stem).strip("-.") or "model"


def refuse_for_ollama(draft: Draft) -> str | None:
    if draft.weights is None or isinstance(draft.weights.files, LocalPath):
        return None
    return "Ollama takes a file, which is not on this machine; run `edgespec pull` first"


LLAMA_METHODS = {
    "model": "draft-simple", "eagle3": "draft-eagle3", "mtp": "draft-mtp", "gemma4-assistant": "draft-mtp",
    "dflash": "draft-dflash", "dspark": "draft-dspark", "ngram": "ngram-simple", "suffix": "ngram-mod",
}  # fmt: skip
OLLAMA_METHODS = {"mtp": "mtp", "gemma4-assistant": "mtp", "dflash": "dflash"}
