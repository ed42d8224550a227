"""GGUF models of other programs on this machine: LM Studio, Ollama, llama.cpp.

Their folders, according to their sources:

- LM Studio: ~/.lmstudio, ~/.cache/lm-studio or the folder named in ~/.lmstudio-home-pointer holds models/ (publisher,
  repository, file) and settings.json, whose `downloadsFolder` names a second folder of models.
- Ollama: OLLAMA_MODELS, else ~/.ollama/models (of its Linux service: /usr/share/ollama/.ollama/models) holds
  manifests/HOST/NAMESPACE/MODEL/TAG and blobs/sha256-HEX; newer releases prefer manifests-v2/. The layer of type
  application/vnd.ollama.image.model names the blob that is the GGUF file. A manifest may be a list of other
  manifests, embedded or named by their blobs.
- llama.cpp: LLAMA_CACHE, else llama.cpp/ in the user's cache folder, holds files, or repositories in the hub's layout.

The folders are only read. Depth and number of entries are bounded, and damaged entries raise nothing.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from edgespec.formats.gguf import MAGIC
from edgespec.models.file_selection import is_model_file, list_parts
from edgespec.models.head_files import is_head

Program = Literal["lm studio", "ollama", "llama.cpp"]

MAX_DEPTH = 6
MAX_ENTRIES = 20_000
MAX_SMALL_FILE_BYTES = 4 * 2**20

_MODEL_LAYER = "application/vnd.ollama.image.model"
_ADAPTER_LAYER = "application/vnd.ollama.image.adapter"
_DIGEST = re.compile(r"sha256[:-][0-9a-fA-F]{64}")
_OLLAMA_FOLDERS = ("~/.ollama/models", "/usr/share/ollama/.ollama/models")
_DEFAULT_HOSTS = ("registry.ollama.ai", "ollama.com")
_SNAPSHOT = re.compile(r"models--(?P<repo>[^/]+)/snapshots/[^/]+/(?P<file>.+)")
_ENDING = re.compile(r"(?:-\d{5}-of-\d{5})?\.gguf", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder in which a program keeps its models; it may not exist."""

    program: Program
    path: Path


@dataclass(frozen=True, slots=True)
class ExternalModel:
    """A model of another program: `path` is the GGUF file or its first part, `size` the bytes of all parts."""

    name: str
    path: Path
    size: int


def list_model_folders() -> list[ModelFolder]:
    """The folders of all programs on this machine, by their own rules; some may not exist."""
    cache = "~/Library/Caches" if sys.platform == "darwin" else os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    ollama, llama_cpp = (os.environ.get(name, "").strip().strip("\"'") for name in ("OLLAMA_MODELS", "LLAMA_CACHE"))
    places: list[tuple[Program, str]] = [
        *(("lm studio", text) for text in _list_lm_studio_folders()),
        *(("ollama", text) for text in ([ollama] if ollama else _OLLAMA_FOLDERS)),
        ("llama.cpp", llama_cpp or f"{cache}/llama.cpp"),
    ]
    found = [ModelFolder(program, Path(os.path.expanduser(text))) for program, text in places]
    return list(dict.fromkeys(folder for folder in found if folder.path.is_absolute() and "\0" not in str(folder.path)))


def find_external_models(
    folders: Iterable[ModelFolder] | None = None, *, exclude: Iterable[Path] = ()
) -> list[ExternalModel]:
    """The models in `folders` (default: those of the environment), sorted by name. Raises nothing.

    A file counts once, even if it has several names or links, and not at all if it is one of `exclude`. Models whose
    name or path cannot be printed are left out, and trained heads.
    """
    candidates: list[ExternalModel] = []
    for folder in list_model_folders() if folders is None else folders:
        candidates += _scan_ollama(folder.path) if folder.program == "ollama" else _scan_folder(folder)
    candidates.sort(key=lambda model: (model.name, str(model.path)))
    seen = set(map(os.path.realpath, exclude))
    found = []
    for model in candidates:
        real = os.path.realpath(model.path)
        if model.name.isprintable() and str(model.path).isprintable() and real not in seen:
            seen.add(real)
            found.append(model)
    return found


def read_gguf_size(path: Path) -> int | None:
    """Bytes of a GGUF model, all parts together; None if a part is missing, unreadable or not GGUF."""
    parts = [path.with_name(name) for name in list_parts(path.name)]
    if any(_read_start(part, len(MAGIC)) != MAGIC for part in parts):
        return None
    try:
        return sum(part.stat().st_size for part in parts)
    except OSError:  # removed in the meantime
        return None


def _list_lm_studio_folders() -> Iterator[str]:
    pointer = _read_start(Path(os.path.expanduser("~/.lmstudio-home-pointer")), 4096)
    for home in filter(None, (pointer.decode("utf-8", "replace").strip(), "~/.lmstudio", "~/.cache/lm-studio")):
        yield f"{home}/models"
        yield str(_read_object(Path(os.path.expanduser(home), "settings.json")).get("downloadsFolder"))


def _scan_folder(folder: ModelFolder) -> Iterator[ExternalModel]:
    for path in _walk_files(folder.path):
        if is_model_file(path.name) and (size := read_gguf_size(path)) is not None and not is_head(path):
            shown = path.relative_to(folder.path).as_posix()
            if match := _SNAPSHOT.fullmatch(shown):
                shown = f"{match['repo'].replace('--', '/', 1)}/{match['file']}"
            yield ExternalModel(f"{folder.program}: {_ENDING.sub('', shown)}", path, size)


def _scan_ollama(folder: Path) -> Iterator[ExternalModel]:
    manifests: dict[str, Path] = {}
    for root in (folder / "manifests-v2", folder / "manifests"):
        for path in _walk_files(root):
            parts = path.relative_to(root).parts
            if len(parts) == 4:
                manifests.setdefault(_format_ollama_name(*parts), path)
    for name, path in manifests.items():
        blob = _find_weights(folder, _read_object(path))
        if blob and (size := read_gguf_size(blob)) is not None:
            yield ExternalModel(f"ollama: {name}", blob, size)


def _format_ollama_name(host: str, namespace: str, model: str, tag: str) -> str:
    """The name as Ollama shows it: its own registry and the namespace "library" are left out."""
    if host in _DEFAULT_HOSTS:
        return f"{model}:{tag}" if namespace == "library" else f"{namespace}/{model}:{tag}"
    return f"{unquote(host)}/{namespace}/{model}:{tag}"


def _find_weights(folder: Path, manifest: dict[str, Any]) -> Path | None:
    """The blob that holds all weights of a model; None for several blobs, and for a model with an adapter."""
    children = _filter_objects(manifest.get("manifests"))
    named = [each if "layers" in each else _read_object(_find_blob(folder, each)) for each in children]
    for each in (manifest, *named):
        layers = _filter_objects(each.get("layers"))
        blobs = [_find_blob(folder, layer) for layer in layers if layer.get("mediaType") == _MODEL_LAYER]
        if len(blobs) == 1 and not any(layer.get("mediaType") == _ADAPTER_LAYER for layer in layers):
            return blobs[0]
    return None


def _find_blob(folder: Path, named: dict[str, Any]) -> Path:
    """The blob of a digest; a path that does not exist if it is none."""
    digest = named.get("digest")
    is_digest = isinstance(digest, str) and _DIGEST.fullmatch(digest)
    return folder / "blobs" / (str(digest).replace(":", "-") if is_digest else "none")


def _walk_files(root: Path) -> Iterator[Path]:
    """Files below `root`, through links; each folder once, without those that cannot be read."""
    entered, count = set(), 0
    for folder, folders, files in os.walk(root, followlinks=True):
        files = files[: MAX_ENTRIES - count]
        count += len(folders) + len(files)
        place, real = Path(folder), os.path.realpath(folder)
        if real not in entered:
            yield from (place / name for name in files)
        if count >= MAX_ENTRIES:
            return
        if real in entered or len(place.relative_to(root).parts) >= MAX_DEPTH - 1:
            folders.clear()
        entered.add(real)


def _read_start(path: Path, count: int) -> bytes:
    """The first bytes of a regular file; empty if they cannot be read. Reading a pipe or device could block."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(count)
    except OSError:
        return b""


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file; empty if there is none."""
    try:
        found = json.loads(_read_start(path, MAX_SMALL_FILE_BYTES))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _filter_objects(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
