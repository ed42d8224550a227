"""Repositories of a model's original weights on Hugging Face, which other engines load."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from edgespec.models.references import Reference
from edgespec.models.registry import ROLES, Registry, is_repository

if TYPE_CHECKING:
    from edgespec.formats.gguf import Header
    from edgespec.formats.mlx_folder import Folder

_KEYS = (  # of a GGUF file, the surest first: what it was converted from, what it is, what it was made from
    "general.source.huggingface.repository",
    "general.source.repo_url",
    "general.source.url",
    "general.repo_url",
    "general.base_model.0.repo_url",
)
_BASE_MODEL = re.compile(r"^base_model:\s*(?:-\s*)?[\"']?([\w./-]+)", re.MULTILINE)  # of a README's first lines
_ADDRESS = re.compile(r"(?:https://(?:huggingface\.co|hf\.co)/)?([\w.-]+/[\w.-]+?)(?:/tree/[^/]+)?/?")


def find_original(reference: Reference, registry: Registry, *, is_head: bool = False) -> str | None:
    """The original of a model that an alias names; None if the registry states none.

    `is_head`: a head or a PARD model, which may lie in the repository of its target.
    """
    roles = ROLES[2:] if is_head else ROLES[:2]
    for entry in registry.entries.values():
        for pair in filter(None, (entry.gguf, entry.mlx)):
            for role in roles:
                known, found = getattr(pair, role), getattr(entry.originals, role)
                if found and getattr(known, "repo", known) == getattr(reference, "repo", reference):
                    return str(found)
    return None


def read_gguf_original(header: Header) -> tuple[str, str] | None:
    """(repository, the key that names it) of the weights that a GGUF file was made from; None if it does not say.

    A fine-tune's base model is not its original: a repository without the name of the fine-tune is left out.
    """
    tune = header.metadata.get("general.finetune")
    for key in _KEYS:
        text = header.metadata.get(key)
        match = _ADDRESS.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None or not is_repository(match[1]):
            continue
        is_base = "base_model" in key and isinstance(tune, str) and tune.lower() not in match[1].lower()
        if not is_base:
            return match[1], key
    return None


def read_folder_original(folder: Folder) -> tuple[str, str] | None:
    """Does the same for a folder that MLX has quantized: what its README or its config names."""
    readme, header = folder.path / "README.md", ""
    if readme.is_file():
        header = readme.read_text(encoding="utf-8", errors="replace").split("\n---", 1)[0]
    match = _BASE_MODEL.search(header)
    for found, key in (
        (match[1] if match else None, "base_model of its README"),
        (folder.config.get("_name_or_path"), "_name_or_path of its config.json"),
    ):
        if isinstance(found, str) and is_repository(found):
            return found, key
    return None
