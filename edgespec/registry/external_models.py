"""GGUF models that other programs left on this machine: LM Studio, Ollama, llama.cpp.

What is assumed of their folders, as their sources have it:

- LM Studio: ~/.lmstudio, ~/.cache/lm-studio or the folder that ~/.lmstudio-home-pointer names holds models/ (publisher,
  repository, file) and settings.json, whose `downloadsFolder` names another folder for the models.
- Ollama: OLLAMA_MODELS, else ~/.ollama/models (of its Linux service: /usr/share/ollama/.ollama/models) holds
  manifests/HOST/NAMESPACE/MODEL/TAG, newer releases manifests-v2/ in front of it, and blobs/sha256-HEX. The
  layer of type application/vnd.ollama.image.model names the blob that is the GGUF file. A manifest may be a list of
  others, whole or by their blobs.
- llama.cpp: LLAMA_CACHE, else llama.cpp/ in the user's cache folder, holds files, or repositories in the hub's layout.

All of it is only read, and bounded in depth and count; nothing found there raises.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from edgespec.formats.gguf import MAGIC
from edgespec.hub.file_selection import is_model_file, part_names

Program = Literal["lm studio", "ollama", "llama.cpp"]

MAX_DEPTH = 6
MAX_ENTRIES = 20_000
MAX_SMALL_FILE_BYTES = 4 * 2**20

_MODEL_LAYER = "application/vnd.ollama.image.model"
_ADAPTER_LAYER = "application/vnd.ollama.image.adapter"
_DIGEST = re.compile(r"sha256[:-][0-9a-fA-F]{64}")
_DEFAULT_HOSTS = ("registry.ollama.ai", "ollama.com")
_SNAPSHOT = re.compile(r"models--(?P<repo>[^/]+)/snapshots/[^/]+/(?P<file>.+)")
_ENDING = re.compile(r"(?:-\d{5}-of-\d{5})?\.gguf", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Place:
    """A folder in which a program keeps its models; it may not exist."""

    program: Program
    folder: Path


@dataclass(frozen=True, slots=True)
class ElsewhereModel:
    """A model of another program: `path` is the GGUF file (or first part) to open, `size` bytes of all parts."""

    name: str
    path: Path
    size: int


def places_from_environment() -> list[Place]:
    """Where the programs keep models here, by their own rules; folders that do not exist are named too."""
    found = [Place("lm studio", folder) for folder in _lm_studio_folders()]
    if stated := _absolute(os.environ.get("OLLAMA_MODELS", "").strip().strip("\"'")):
        found.append(Place("ollama", stated))
    else:
        homes = ["~/.ollama/models", *(["/usr/share/ollama/.ollama/models"] if sys.platform == "linux" else [])]
        found += [Place("ollama", folder) for home in homes if (folder := _absolute(home))]
    caches = {"darwin": "~/Library/Caches", "win32": os.environ.get("LOCALAPPDATA", "")}
    cache = caches.get(sys.platform) or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    if folder := _absolute(os.environ.get("LLAMA_CACHE") or os.path.join(cache, "llama.cpp")):
        found.append(Place("llama.cpp", folder))
    return list(dict.fromkeys(found))


def external_models(places: Iterable[Place] | None = None, *, besides: Iterable[Path] = ()) -> list[ElsewhereModel]:
    """The models in `places` (default: those of the environment), by name; raises nothing.

    A file counts once, whatever names and links it has, and not at all if it is one of `besides`. What cannot be
    printed is left out.
    """
    candidates: list[ElsewhereModel] = []
    for place in places_from_environment() if places is None else places:
        candidates += _ollama(place.folder) if place.program == "ollama" else _tree(place)
    candidates.sort(key=lambda model: (model.name, str(model.path)))
    seen = {_identity(path) for path in besides}
    found = []
    for model in candidates:
        identity = _identity(model.path)
        printable = model.name.isprintable() and str(model.path).isprintable()
        if printable and identity is not None and identity not in seen:
            seen.add(identity)
            found.append(model)
    return found


def gguf_size(path: Path) -> int | None:
    """Bytes of a GGUF model, all parts together; None where a part is missing, unreadable or not GGUF."""
    total = 0
    for name in part_names(path.name):
        data = _beginning(path.with_name(name), len(MAGIC))
        if data != MAGIC:
            return None
        try:
            total += os.stat(path.with_name(name)).st_size
        except OSError:
            return None
    return total


def _lm_studio_folders() -> Iterator[Path]:
    pointer = _absolute("~/.lmstudio-home-pointer")
    named = (_beginning(pointer, 4096) or b"").decode("utf-8", "replace").strip() if pointer else ""
    for text in (named, "~/.lmstudio", "~/.cache/lm-studio"):
        home = _absolute(text)
        if home is None:
            continue
        yield home / "models"
        stated = _object(home / "settings.json").get("downloadsFolder")
        if isinstance(stated, str) and (folder := _absolute(stated)):
            yield folder


def _tree(place: Place) -> Iterator[ElsewhereModel]:
    for path in _files(place.folder):
        if is_model_file(path.name) and (size := gguf_size(path)) is not None:
            shown = path.relative_to(place.folder).as_posix()
            if match := _SNAPSHOT.fullmatch(shown):
                shown = f"{match['repo'].replace('--', '/', 1)}/{match['file']}"
            yield ElsewhereModel(f"{place.program}: {_ENDING.sub('', shown)}", path, size)


def _ollama(folder: Path) -> Iterator[ElsewhereModel]:
    manifests: dict[str, Path] = {}
    for root in (folder / "manifests-v2", folder / "manifests"):
        for path in _files(root):
            parts = path.relative_to(root).parts
            if len(parts) == 4:
                manifests.setdefault(_ollama_name(*parts), path)
    for name, path in manifests.items():
        blob = _weights(folder, _object(path))
        if blob is not None and (size := gguf_size(blob)) is not None:
            yield ElsewhereModel(f"ollama: {name}", blob, size)


def _ollama_name(host: str, namespace: str, model: str, tag: str) -> str:
    """The name as Ollama shows it: without its own registry, and there without the common namespace."""
    if host in _DEFAULT_HOSTS:
        return f"{model}:{tag}" if namespace == "library" else f"{namespace}/{model}:{tag}"
    return f"{unquote(host)}/{namespace}/{model}:{tag}"


def _weights(folder: Path, manifest: dict[str, Any]) -> Path | None:
    """The blob with all the weights of a model, if it is one blob; with an adapter that is another model."""
    for each in (manifest, *(_child(folder, child) for child in _objects(manifest.get("manifests")))):
        layers = _objects(each.get("layers"))
        blobs = [_blob(folder, layer) for layer in layers if layer.get("mediaType") == _MODEL_LAYER]
        if len(blobs) == 1 and not any(layer.get("mediaType") == _ADAPTER_LAYER for layer in layers):
            return blobs[0]
    return None


def _child(folder: Path, child: dict[str, Any]) -> dict[str, Any]:
    blob = None if "layers" in child else _blob(folder, child)
    return child if blob is None else _object(blob)


def _blob(folder: Path, named: dict[str, Any]) -> Path | None:
    digest = named.get("digest")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        return None
    return folder / "blobs" / digest.replace(":", "-")


def _files(folder: Path) -> Iterator[Path]:
    """Files below `folder`, nearest first, through links; a folder is entered once, what cannot be read is not."""
    waiting, entered, count = deque([(folder, 1)]), set(), 0
    while waiting:
        place, depth = waiting.popleft()
        identity = _identity(place)
        if identity is None or identity in entered:
            continue
        entered.add(identity)
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    count += 1
                    if count > MAX_ENTRIES:
                        return
                    if _is_folder(entry):
                        if depth < MAX_DEPTH:
                            waiting.append((place / entry.name, depth + 1))
                    else:
                        yield place / entry.name
        except OSError:
            continue


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads in a circle
        return False


def _identity(path: Path) -> tuple[int, int] | None:
    """What is the same for all names and links of a file or folder; None where there is none."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _beginning(path: Path, count: int) -> bytes | None:
    """The first bytes of a regular file (another kind might never answer); None where they cannot be read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        with open(path, "rb") as file:
            return file.read(count)
    except (OSError, ValueError):
        return None


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file; empty where there is none."""
    try:
        found = json.loads(_beginning(path, MAX_SMALL_FILE_BYTES) or b"")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _objects(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _absolute(text: str) -> Path | None:
    """The path that a setting names, with the home folder filled in; None for none and for relative ones."""
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        return None
    return path if path.is_absolute() else None
