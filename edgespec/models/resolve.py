"""Resolves a model reference to its target and draft; no weights are downloaded, no runtime is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.backends import FileBackend
from edgespec.errors import UnknownModel
from edgespec.formats.gguf import Header, join_parts
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.head_file import ModelMetadata
from edgespec.formats.mlx_folder import read_config, read_folder, refuse_adapter
from edgespec.models.cache import RemoteModel, snapshot_path
from edgespec.models.file_selection import Kind, list_parts
from edgespec.models.hub import Hub
from edgespec.models.packaged import find_packaged
from edgespec.models.references import (
    FORMS,
    Alias,
    HubFile,
    HubQuant,
    HubRepo,
    LocalPath,
    PackagedFile,
    Reference,
    is_gguf_name,
    parse_reference,
)
from edgespec.models.registry import Entry, Pair, Registry, SamplingDefaults
from edgespec.text.chat_template import read_template

_PARD_KEY = "tokenizer.ggml.mask_token_id"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine: a GGUF file (the first part of a split one) or an MLX folder."""

    path: Path
    kind: Kind


Source = LocalModel | RemoteModel
"""What can be opened; a model of the hub is cached or not."""


@dataclass(frozen=True, slots=True)
class ResolvedPair:
    """A target, what the registry pairs with it, and the sampling that the target's authors recommend.

    Drafts are references, because they need not be reachable unless they are used.
    """

    name: str
    target: Source
    models: Pair
    sampling: SamplingDefaults


def resolve_pair(text: str | None, backend: FileBackend, registry: Registry, hub: Hub) -> ResolvedPair:
    """The sources that `text` names for `backend`; None names the registry's default.

    A repository that is the target of an alias gets that alias's draft. For cached models no request is sent. Raises
    UnknownModel, InvalidModelFile, HubError.
    """
    reference = parse_reference(registry.default if text is None else text)
    entry = _find_entry(reference, backend, registry)
    if entry is None:
        source = resolve_source(reference, backend, hub)
        return ResolvedPair(str(reference), source, Pair(reference), SamplingDefaults())
    pair = choose_pair(entry, backend)
    target = pair.target if isinstance(reference, Alias) else reference
    return ResolvedPair(str(reference), resolve_source(target, backend, hub), pair, entry.sampling)


def find_pard_token(model: ModelMetadata) -> int | None:
    """The mask token that the model's own files name; None if they name none."""
    token: object = model.metadata.get(_PARD_KEY) if isinstance(model, Header) else model.config.get("pard_token")
    return token if type(token) is int and token >= 0 else None


def resolve_source(reference: Reference, backend: FileBackend, hub: Hub) -> Source:
    """The source that a reference names. Raises UnknownModel, also for an alias, InvalidModelFile and HubError."""
    if isinstance(reference, Alias):
        raise UnknownModel(f"{reference.name!a} is an alias; a file or repository is required here.", hint=FORMS)
    if isinstance(reference, LocalPath):
        return _resolve_local(reference.path, backend)
    if isinstance(reference, PackagedFile):
        place = find_packaged(reference)
        if place is None:
            raise UnknownModel(
                f"No installed package has {reference}.", hint="Install that package, or edgespec again."
            )
        return LocalModel(place, "gguf")
    model = hub.find_cached(reference) or hub.resolve(reference)
    if (backend == "mlx") == (model.kind == "mlx"):
        return model
    kind, other = ("a GGUF", "llamacpp") if model.kind == "gguf" else ("an MLX", "mlx")
    raise UnknownModel(f"{reference} is {kind} model, which {backend} does not open.", hint=f"Use --backend {other}.")


def is_here(reference: Reference, hub: Hub) -> bool:
    """Tells whether a model needs no download."""
    return not isinstance(reference, HubRepo | HubQuant | HubFile) or hub.find_cached(reference) is not None


def read_metadata(source: Source, hub: Hub) -> ModelMetadata:
    """The checked metadata of a source; weights are not read.

    From the hub, this fetches the first bytes of a GGUF file, or the small files of a folder into the cache. Raises
    InvalidModelFile, HubError, CacheError.
    """
    if isinstance(source, RemoteModel):
        if source.kind == "gguf":
            return hub.header(source)
        weights = sum(file.size for file in source.files if file.path.endswith(".safetensors"))
        small = tuple(file for file in source.files if not file.path.endswith(".safetensors"))
        return read_config(hub.fetch(replace(source, files=small)), source.repo, weights)
    if source.kind == "mlx":
        return read_folder(source.path)
    return read_parts(source.path)


def find_template(found: ModelMetadata) -> str | None:
    """The chat template of a model; None without one. Raises InvalidModelFile for one that cannot be read."""
    if isinstance(found, Header):
        source = found.metadata.get("tokenizer.chat_template")
        return source if isinstance(source, str) else None
    return read_template(found.path)


def read_parts(path: Path) -> Header:
    """The header of a local GGUF model, all its parts together. Raises InvalidModelFile, CacheError."""
    return join_parts([read_file(path.with_name(name)) for name in list_parts(path.name)])


def fetch_source(source: Source, hub: Hub) -> Path:
    """The GGUF file or MLX folder to open; downloads the missing files of a hub source. Raises as Hub.fetch does."""
    return hub.fetch(source) if isinstance(source, RemoteModel) else source.path


def find_local(source: Source, hub: Hub) -> Path | None:
    """The GGUF file or MLX folder of a source; None if a file of it is not downloaded."""
    if isinstance(source, LocalModel):
        return source.path
    paths = [snapshot_path(hub.cache_dir, source, file.path) for file in source.files]
    if not all(path.exists() for path in paths):
        return None
    return paths[0] if source.kind == "gguf" else paths[0].parent


def detect_backend(text: str | None, registry: Registry, hub: Hub, *, prefer_mlx: bool) -> FileBackend:
    """The runtime for the format of the model `text`; if an alias has both formats, MLX if `prefer_mlx`.

    Raises UnknownModel, HubError.
    """
    reference = parse_reference(registry.default if text is None else text)
    if isinstance(reference, LocalPath):
        return detect_local_backend(reference.path, prefer_mlx=prefer_mlx)
    if isinstance(reference, HubRepo):
        return "mlx" if (hub.find_cached(reference) or hub.resolve(reference)).kind == "mlx" else "llamacpp"
    entry = registry.get(reference.name) if isinstance(reference, Alias) else None
    return "mlx" if entry and entry.mlx and (prefer_mlx or not entry.gguf) else "llamacpp"


def detect_local_backend(path: Path, *, prefer_mlx: bool) -> FileBackend:
    """The runtime for a file or folder; if a folder has both formats, MLX if `prefer_mlx`."""
    is_folder = (path / "config.json").is_file() and any(path.glob("*.safetensors"))
    return "mlx" if is_folder and (prefer_mlx or not any(path.glob("*.gguf"))) else "llamacpp"


def _find_entry(reference: Reference, backend: FileBackend, registry: Registry) -> Entry | None:
    """The entry of an alias, or the first entry whose target is in the repository of `reference`."""
    if isinstance(reference, Alias):
        return registry.get(reference.name)
    if not isinstance(reference, HubRepo | HubQuant | HubFile):
        return None
    for entry in registry.entries.values():
        pair = entry.pair(backend)
        if pair and getattr(pair.target, "repo", None) == reference.repo:
            return entry
    return None


def choose_pair(entry: Entry, backend: FileBackend) -> Pair:
    """The pair of an alias for `backend`. Raises UnknownModel if it has none."""
    pair = entry.pair(backend)
    if pair is None:
        other = "mlx" if backend == "llamacpp" else "llamacpp"
        raise UnknownModel(f"{entry.alias} has no model for {backend}.", hint=f"Use --backend {other}.")
    return pair


def _resolve_local(path: Path, backend: FileBackend) -> Source:
    if backend == "mlx":
        if not path.is_dir():
            problem = "is a file" if path.exists() else "does not exist"
            raise UnknownModel(
                f"'{path}' {problem}; MLX opens a folder.",
                hint="Name a folder with config.json; target and draft run on one runtime.",
            )
        return LocalModel(path, "mlx")
    if path.is_dir():
        found = sorted(each for each in path.iterdir() if is_gguf_name(each.name))
        first = [each for each in found if list_parts(each.name)[0] == each.name]
        if not first:
            refuse_adapter(path)
        if len(first) != 1:
            problem = f"{len(first)} GGUF models" if first else "no GGUF model"
            raise UnknownModel(f"The folder {path} holds {problem}.", hint="Name one .gguf file.")
        return LocalModel(first[0], "gguf")
    for name in list_parts(path.name):
        if not path.with_name(name).is_file():
            raise UnknownModel(f"There is no file {path.with_name(name)}.", hint="Check the path.")
    return LocalModel(path.with_name(list_parts(path.name)[0]), "gguf")
