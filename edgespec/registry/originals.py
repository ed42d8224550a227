"""Repositories of a model's original weights on Hugging Face, which other engines load."""

from __future__ import annotations

import importlib.resources
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.errors import UnknownModel
from edgespec.hub.cache import HubRepo, PackagedFile, Reference, parse_reference

if TYPE_CHECKING:
    from edgespec.formats.gguf import Header
    from edgespec.formats.mlx_folder import Folder
    from edgespec.registry.schema import Registry


ROLES = ("target", "draft", "pard", "head")
_KEYS = (  # of a GGUF file, the surest first: what it was converted from, what it is, what it was made from
    "general.source.huggingface.repository",
    "general.source.repo_url",
    "general.source.url",
    "general.repo_url",
    "general.base_model.0.repo_url",
)
_BASE_MODEL = re.compile(r"^base_model:\s*(?:-\s*)?[\"']?([\w./-]+)", re.MULTILINE)  # of a README's first lines
_ADDRESS = re.compile(r"(?:https://(?:huggingface\.co|hf\.co)/)?([\w.-]+/[\w.-]+?)(?:/tree/[^/]+)?/?")


def is_repository(text: object) -> bool:
    """Tells whether `text` names a repository, `user/repo`, and nothing in it."""
    try:
        return isinstance(text, str) and parse_reference(f"hf:{text}") == HubRepo(text)
    except UnknownModel:
        return False


def find_original(reference: Reference, registry: Registry, *, is_head: bool = False) -> str | None:
    """The original of a model that an alias names; None where the registry states none.

    `is_head`: a head or a PARD model, which may lie in the repository of its target.
    """
    for entry in registry.entries.values():
        for pair in (entry.gguf, entry.mlx):
            for role in (ROLES[2:] if is_head else ROLES[:2]) if pair is not None else ():
                known = getattr(pair, role)
                if known is not None and (known == reference or _share_repo(known, reference)):
                    found: str | None = getattr(entry.originals, role)
                    if found is not None:
                        return found
    return None


def _share_repo(one: Reference, other: Reference) -> bool:
    repo = getattr(one, "repo", None)
    return repo is not None and repo == getattr(other, "repo", None)


def read_gguf_original(header: Header) -> tuple[str, str] | None:
    """(repository, the key that names it) of the weights that a GGUF file was made from; None where it does not say.

    A fine-tune's base model is not its original: a repository without the name of the fine-tune is left out.
    """
    tune = header.metadata.get("general.finetune")
    for key in _KEYS:
        text = header.metadata.get(key)
        match = _ADDRESS.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None or not is_repository(match[1]):
            continue
        is_base = "base_model" in key
        if is_base and isinstance(tune, str) and tune.lower() not in match[1].lower():
            continue
        return match[1], key
    return None


def read_folder_original(folder: Folder) -> tuple[str, str] | None:
    """Does the same for a folder that MLX has quantized: what its README or its config names."""
    for found, key in (
        (_read_base_model(folder.path), "base_model of its README"),
        (folder.config.get("_name_or_path"), "_name_or_path of its config.json"),
    ):
        if isinstance(found, str) and is_repository(found):
            return found, key
    return None


def _read_base_model(folder: Path) -> str | None:
    try:
        text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    header = text.split("\n---", 1)[0] if text.startswith("---") else ""
    match = _BASE_MODEL.search(header)
    return match[1] if match else None


# Files that come in Python packages: the embedded pair in this one, weights in others.


def find_packaged(reference: PackagedFile) -> Path | None:
    """The file on this machine, in edgespec's assets or in another installed package; None where it is in neither.

    No package is imported for it.
    """
    first, _, rest = reference.path.partition("/")
    folders = [_find_assets() / first]
    if first.isidentifier() and (spec := importlib.util.find_spec(first)) is not None:
        folders += [Path(folder) for folder in spec.submodule_search_locations or ()]
    return next((folder / rest for folder in folders if (folder / rest).is_file()), None)


def name_packaged(path: Path) -> PackagedFile:
    """The reference of a file that `find_packaged` has found."""
    assets = _find_assets()
    inner = path.relative_to(assets if path.is_relative_to(assets) else path.parent.parent)
    return PackagedFile(inner.as_posix())


def _find_assets() -> Path:
    return Path(str(importlib.resources.files("edgespec"))) / "assets"
