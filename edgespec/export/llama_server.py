"""llama.cpp's server, with the GGUF files in use. Options: common/arg.cpp of the llama.cpp that edgespec builds."""

from __future__ import annotations

from edgespec.export.plan import Container, Draft, Exported, ExportPlan, Weights, mount_files
from edgespec.hub.cache import HubFile, HubQuant, HubRepo, LocalPath, parse_quant

METHODS = {
    "model": "draft-simple", "eagle3": "draft-eagle3", "mtp": "draft-mtp", "gemma4-assistant": "draft-mtp",
    "dflash": "draft-dflash", "dspark": "draft-dspark", "ngram": "ngram-simple", "suffix": "ngram-mod",
}  # fmt: skip
MEASURE = "`timings` of a response has draft_n and draft_n_accepted"
_IMAGE = "${LLAMA_SERVER_IMAGE:?the server image of llama.cpp, which its documents name}"
_PORT = 8080


def render(plan: ExportPlan, draft: Draft | None, length: int) -> Exported:
    """`llama-server` with local files where they are here; else it downloads them when it starts."""
    words = _name_target(plan.target)
    if draft is not None:
        if draft.weights is not None:
            words += _name_draft(draft.weights)
        beside = [each.method for each in plan.drafts if each.method in ("ngram", "suffix") and each is not draft]
        words += ["--spec-type", ",".join(METHODS[method] for method in (*beside, draft.method))]
        if draft.method not in ("ngram", "suffix"):
            words += ["--spec-draft-n-max", str(length)]
    volumes = (("llama-cpp", "/root/.cache"), *mount_files(plan, draft))
    everywhere = (*words, "--host", "0.0.0.0", "--port", str(_PORT))
    remark = "It uses no GPU: for one, take an image that is built for it, and reserve the device."
    container = Container(_IMAGE, everywhere, _PORT, volumes, has_gpu=False, remark=remark)
    return Exported((("llama-server", *words),), container)


def _name_target(target: Weights) -> list[str]:
    match target.files:
        case LocalPath(path):
            return ["--model", str(path)]
        case HubQuant(repo, quant):
            return ["--hf-repo", f"{repo}:{quant}"]
        case HubFile(repo, path):
            return ["--hf-repo", repo, "--hf-file", path]
        case HubRepo(repo):
            return ["--hf-repo", repo]


def refuse(draft: Draft) -> str | None:
    """Why a draft cannot be loaded: llama-server downloads those that are not here by their quantization alone."""
    files = draft.weights.files if draft.weights is not None else None
    if isinstance(files, HubFile) and ("/" in files.path or parse_quant(files.path) is None):
        return "llama-server cannot download this file; run `edgespec pull` first"
    return None


def _name_draft(draft: Weights) -> list[str]:
    match draft.files:
        case LocalPath(path):
            return ["--spec-draft-model", str(path)]
        case HubQuant(repo, quant):
            return ["--spec-draft-hf", f"{repo}:{quant}"]
        case HubFile(repo, file):
            return ["--spec-draft-hf", f"{repo}:{parse_quant(file)}"]
        case HubRepo(repo):
            return ["--spec-draft-hf", repo]
