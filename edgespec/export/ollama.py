"""Ollama: a Modelfile of the GGUF files in use. Grammar: parser/parser.go of version 0.33.0-rc2.

Ollama runs a file named by DRAFT as an MTP layer, or as a DFlash head where that is its architecture. An ordinary draft
model or an EAGLE-3 head would be taken for the former, so neither is exported.
"""

from __future__ import annotations

import re

from edgespec.errors import InvalidRequest
from edgespec.export.plan import Container, Draft, Exported, ExportPlan, Weights, mount_files
from edgespec.hub.cache import HubFile, HubQuant, HubRepo, LocalPath, parse_quant

METHODS = {"mtp": "mtp", "gemma4-assistant": "mtp", "dflash": "dflash"}
FILE = "edgespec.Modelfile"
_PORT = 11434


def render(plan: ExportPlan, draft: Draft | None, length: int) -> Exported:
    """`ollama create` from a Modelfile, and `ollama run`. Raises InvalidRequest for paths that no Modelfile holds."""
    stem = plan.name.rsplit("/", 1)[-1].lower().removesuffix(".gguf")
    name = re.sub(r"[^a-z0-9._-]+", "-", stem).strip("-.") or "model"
    lines = [f"FROM {_name_target(plan.target)}"]
    if draft is not None:
        if draft.weights is not None:
            lines.append(f"DRAFT {draft.weights.files}")
        lines.append(f"PARAMETER draft_num_predict {length}")
    if any(not line.isprintable() for line in lines):
        raise InvalidRequest("a Modelfile cannot name a file with a line break in its path.", hint="Rename it.")
    volumes = (("ollama", "/root/.ollama"), (f"./{FILE}", f"/{FILE}"), *mount_files(plan, draft))
    remark = f"Once it runs: docker compose exec model ollama create {name} -f /{FILE}"
    container = Container("ollama/ollama", ("serve",), _PORT, volumes, remark=remark)
    remarks = ("Older versions of Ollama do not know DRAFT and draft_num_predict.",) if draft is not None else ()
    commands = (("ollama", "create", name, "-f", FILE), ("ollama", "run", name))
    files = {FILE: "".join(f"{line}\n" for line in lines)}
    return Exported(commands, container, files, remarks)


def _name_target(target: Weights) -> str:
    match target.files:
        case LocalPath(path):
            return str(path)
        case HubQuant(repo, quant):
            return f"hf.co/{repo}:{quant}"
        case HubFile(repo, file):
            return f"hf.co/{repo}:{parse_quant(file) if '/' in file else file}"
        case HubRepo(repo):
            return f"hf.co/{repo}"


def refuse(draft: Draft) -> str | None:
    """Why a draft cannot be loaded: DRAFT names a file."""
    if draft.weights is None or isinstance(draft.weights.files, LocalPath):
        return None
    return "Ollama takes a file, which is not on this machine; run `edgespec pull` first"
