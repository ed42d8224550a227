"""Repositories of a model's original weights on Hugging Face, which other engines load."""

from __future__ import annotations

import importlib.resources
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from edgespec.errors import RegistryError, UnknownModel
from edgespec.hub.cache import HubRepo, PackagedFile, Reference, parse_reference

if TYPE_CHECKING:
    from edgespec.formats.gguf import Header
    from edgespec.formats.mlx_folder import Folder
    from edgespec.registry.schema import Registry


ROLES = ("target", "draft", "pard", "head")
_BACKENDS = ("gguf", "mlx")
_KEYS = (  # of a GGUF file, the surest first: what it was converted from, what it is, what it was made from
    "general.source.huggingface.repository",
    "general.source.repo_url",
    "general.source.url",
    "general.repo_url",
    "general.base_model.0.repo_url",
)
_BASE_MODEL = re.compile(r"^base_model:\s*(?:-\s*)?[\"']?([\w./-]+)", re.MULTILINE)  # of a README's first lines
_ADDRESS = re.compile(r"(?:https://(?:huggingface\.co|hf\.co)/)?([\w.-]+/[\w.-]+?)(?:/tree/[^/]+)?/?")


@dataclass(frozen=True, slots=True)
class Originals:
    """`user/repo` of the weights as their authors released them; None where none is stated.

    head  that of the target where the head lies in the target's own files
    """

    target: str | None = None
    draft: str | None = None
    pard: str | None = None
    head: str | None = None


def find_originals_error(table: object) -> str | None:
    """What is wrong with the table `originals` of a model in models.toml; None for nothing."""
    if not isinstance(table, dict):
        return "originals is not a table"
    for role, text in table.items():
        if role not in ROLES:
            return f"originals has the key {role!a}, which is not one of {', '.join(ROLES)}"
        if not is_repository(text):
            return f"the original of the {role} is not a repository such as Qwen/Qwen3-32B"
    return None


def is_repository(text: object) -> bool:
    """Whether `text` names a repository, `user/repo`, and nothing in it."""
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
    """As `read_gguf_original`, of a folder that MLX has quantized: what its README or its config names."""
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


def drop_stale_originals(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """`base`, a model's table, without the originals of models that the table `over` replaces."""
    changed = {role for name in _BACKENDS if isinstance(pair := over.get(name), dict) for role in ROLES if role in pair}
    known = base.get("originals")
    if not changed or not isinstance(known, dict):
        return dict(base)
    return {**base, "originals": {role: text for role, text in known.items() if role not in changed}}


# What models.toml says about a model for whoever chooses one: size, licence and tasks.


Task = Literal["chat", "code", "reasoning"]
TASKS: tuple[Task, ...] = get_args(Task)
ABOUT_KEYS = ("parameters", "active", "license", "tasks")


@dataclass(frozen=True, slots=True)
class About:
    """None or empty where nothing is stated.

    parameters  of the target, in billions
    active      those of them that one token uses, in a mixture of experts
    license     of the weights, as people call it
    tasks       what the model is known for
    """

    parameters: float | None = None
    active: float | None = None
    license: str | None = None
    tasks: tuple[Task, ...] = ()


def find_about_error(table: Mapping[str, object]) -> str | None:
    """What is wrong with the keys of `ABOUT_KEYS` in a table of models.toml; None for nothing."""
    for key in ("parameters", "active"):
        number = table.get(key)
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | float) or number <= 0):
            return f"{key} is not a positive number of billions"
    if not isinstance(table.get("license", ""), str):
        return "license is not text"
    tasks = table.get("tasks", [])
    if not isinstance(tasks, list) or any(task not in TASKS for task in tasks):
        return f"tasks is not a list of {', '.join(TASKS)}"
    return None


def read_about(table: Mapping[str, object]) -> About:
    """From a table that has no error."""
    stated = {key: table[key] for key in ABOUT_KEYS if key in table}
    tasks = stated.pop("tasks", ())
    assert isinstance(tasks, list | tuple)
    return About(**stated, tasks=tuple(tasks))  # type: ignore[arg-type]


# The user's models.toml over the shipped one, key by key.


Table = dict[str, object]


def merge_tables(base: dict[str, Table], over: dict[str, Table]) -> dict[str, Table]:
    """The tables of both by alias; what was stated for a model that `over` replaces is dropped."""
    merged = {alias: dict(table) for alias, table in base.items()}
    for alias, table in over.items():
        entry = merged[alias] = drop_stale_originals(merged.get(alias, {}), table)
        for key, value in table.items():
            old = entry.get(key)
            if not isinstance(value, dict) or not isinstance(old, dict):
                entry[key] = value
                continue
            stale = {"acceptance"} if {"target", "draft"} & value.keys() else set()  # measured for another pair
            stale |= {"pard_token"} if "pard" in value else set()  # of another model
            stale |= {"head_kind", "head_verified"} if "head" in value else set()  # of another head
            entry[key] = {**{name: kept for name, kept in old.items() if name not in stale}, **value}
    return merged


# Files that come in Python packages: models.toml and the embedded pair in this one, weights in others.


FILE_NAME = "models.toml"


def read_shipped() -> str:
    """models.toml of the installed package, or of a source checkout. Raises RegistryError."""
    package = importlib.resources.files("edgespec")
    for place in (package.joinpath(FILE_NAME), Path(str(package)).parent / FILE_NAME):
        if place.is_file():
            return place.read_text(encoding="utf-8")
    raise RegistryError("The list of models is missing from this installation.", hint="Install edgespec again.")


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
