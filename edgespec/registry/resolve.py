"""From what the user typed to a pair of model sources; nothing is downloaded and no runtime is loaded here."""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass, replace
from pathlib import Path
from typing import assert_never

from edgespec.backends import FileBackend
from edgespec.errors import InvalidModelFile, UnknownModel
from edgespec.formats.gguf import join_parts
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.metadata import ModelMetadata
from edgespec.formats.mlx_folder import read_config, read_folder
from edgespec.hub.cache import RemoteModel
from edgespec.hub.download import Progress
from edgespec.hub.file_selection import part_names
from edgespec.hub.hub import Hub
from edgespec.hub.reference import (
    FORMS,
    Alias,
    HubFile,
    HubQuant,
    HubReference,
    HubRepo,
    LocalPath,
    PackagedFile,
    Reference,
    is_gguf_name,
    parse_reference,
)
from edgespec.registry.schema import DEFAULT_ALIAS, Acceptance, Entry, Pair, Registry, SamplingDefaults


@dataclass(frozen=True, slots=True)
class LocalGguf:
    """A GGUF file on this machine (the first part of a split one)."""

    path: Path


@dataclass(frozen=True, slots=True)
class PackagedGguf:
    """A GGUF file shipped with edgespec, which both runtimes open."""

    path: Path


@dataclass(frozen=True, slots=True)
class HubGguf:
    """A GGUF model on the hub, cached or not."""

    model: RemoteModel


@dataclass(frozen=True, slots=True)
class LocalMlx:
    """An MLX model folder on this machine."""

    path: Path


@dataclass(frozen=True, slots=True)
class HubMlx:
    """An MLX model on the hub, cached or not."""

    model: RemoteModel


Source = LocalGguf | PackagedGguf | HubGguf | LocalMlx | HubMlx


@dataclass(frozen=True, slots=True)
class Resolved:
    """A named target, the draft model that goes with it (None: n-grams) with what was measured of it, and the sampling
    that the target's authors recommend.

    The draft is a reference still, for whoever drafts without it should not need it to be reachable.
    """

    name: str
    target: Source
    draft: Reference | None
    sampling: SamplingDefaults
    acceptance: Acceptance | None = None


def resolve_pair(text: str | None, backend: FileBackend, registry: Registry, hub: Hub) -> Resolved:
    """The sources that `text` names for `backend`; None names the embedded pair.

    A repository that some alias has as its target brings that alias's draft along. What the cache holds is taken from
    there without a request. Raises UnknownModel, InvalidModelFile, HubError.
    """
    reference = parse_reference(text) if text is not None else Alias(DEFAULT_ALIAS)
    entry = _entry_for(reference, backend, registry)
    if entry is None:
        return Resolved(str(reference), open_source(reference, backend, hub), None, SamplingDefaults())
    pair = _pair(entry, backend)
    target = pair.target if isinstance(reference, Alias) else reference
    return Resolved(str(reference), open_source(target, backend, hub), pair.draft, entry.sampling, pair.acceptance)


def open_source(reference: Reference, backend: FileBackend, hub: Hub) -> Source:
    """The source a reference names (aliases have no single one); raises UnknownModel, InvalidModelFile, HubError."""
    match reference:
        case Alias(name):
            raise UnknownModel(f"{name!a} is an alias, and a file or repository is needed here.", hint=FORMS)
        case LocalPath(path):
            return _local(path, backend)
        case PackagedFile(path):
            return _packaged(path)
        case HubRepo() | HubQuant() | HubFile():
            return _on_hub(reference, backend, hub)
        case _:
            assert_never(reference)


def source_facts(source: Source, hub: Hub, progress: Progress | None = None) -> ModelMetadata:
    """What a source says of itself, checked, without its weights.

    On the hub only the first bytes of a GGUF file are read; of a folder, the small files go to the cache.
    """
    if isinstance(source, HubGguf):
        return hub.header(source.model)
    if isinstance(source, HubMlx):
        weights = sum(file.size for file in source.model.files if file.path.endswith(".safetensors"))
        small = tuple(file for file in source.model.files if not file.path.endswith(".safetensors"))
        return read_config(hub.fetch(replace(source.model, files=small), progress), source.model.repo, weights)
    if isinstance(source, LocalMlx):
        return read_folder(source.path)
    names = part_names(source.path.name)
    return join_parts([read_file(source.path.with_name(name)) for name in names])


def source_path(source: Source, hub: Hub, progress: Progress | None = None) -> Path:
    """The file (GGUF) or folder (MLX) to open; downloads what a hub source still lacks."""
    if isinstance(source, HubGguf | HubMlx):
        return hub.fetch(source.model, progress)
    return source.path


def best_backend(text: str | None, registry: Registry, hub: Hub, *, prefer_mlx: bool) -> FileBackend:
    """The runtime that opens what `text` names: by its format; where an alias has both, MLX if `prefer_mlx`.

    Raises UnknownModel, HubError.
    """
    reference = parse_reference(text) if text is not None else Alias(DEFAULT_ALIAS)
    if isinstance(reference, LocalPath):
        path = reference.path
        is_folder = (path / "config.json").is_file() and any(path.glob("*.safetensors"))
        return "mlx" if is_folder and (prefer_mlx or not any(path.glob("*.gguf"))) else "llamacpp"
    if isinstance(reference, HubRepo):
        return "mlx" if (hub.cached(reference) or hub.resolve(reference)).kind == "mlx" else "llamacpp"
    entry = _entry_for(reference, "llamacpp", registry)
    if isinstance(reference, Alias) and entry is not None and entry.mlx and (prefer_mlx or not entry.gguf):
        return "mlx"
    return "llamacpp"


def _entry_for(reference: Reference, backend: FileBackend, registry: Registry) -> Entry | None:
    """The alias, or the first entry whose target is in the repository that `reference` names."""
    if isinstance(reference, Alias):
        return registry.get(reference.name)
    if not isinstance(reference, HubRepo | HubQuant | HubFile):
        return None
    for entry in registry.entries.values():
        pair = entry.pair(backend)
        if pair and getattr(pair.target, "repo", None) == reference.repo:
            return entry
    return None


def _pair(entry: Entry, backend: FileBackend) -> Pair:
    pair = entry.pair(backend)
    if pair is None:
        other = "mlx" if backend == "llamacpp" else "llamacpp"
        raise UnknownModel(f"{entry.alias} has no model for {backend}.", hint=f"use --backend {other}")
    return pair


def _local(path: Path, backend: FileBackend) -> Source:
    if backend == "mlx":
        if not path.is_dir():
            told = "is a file" if path.exists() else "does not exist"
            raise UnknownModel(
                f"{path} {told}; MLX opens a folder.",
                hint="name the folder with config.json; target and draft run on one runtime",
            )
        if not (path / "config.json").is_file():
            raise InvalidModelFile(f"{path} is not an MLX model: it has no config.json.", hint="name another folder")
        return LocalMlx(path)
    if path.is_dir():
        found = sorted(each for each in path.iterdir() if is_gguf_name(each.name))
        first = [each for each in found if part_names(each.name)[0] == each.name]
        if len(first) != 1:
            told = f"{len(first)} GGUF models" if first else "no GGUF model"
            raise UnknownModel(f"The folder {path} holds {told}.", hint="name one .gguf file")
        return LocalGguf(first[0])
    for name in part_names(path.name):
        if not path.with_name(name).is_file():
            raise UnknownModel(f"There is no file {path.with_name(name)}.", hint="check the path")
    return LocalGguf(path.with_name(part_names(path.name)[0]))


def _packaged(path: str) -> Source:
    """One form of the weights for both runtimes: MLX reads the packaged GGUF files too."""
    place = Path(str(importlib.resources.files("edgespec"))) / "assets" / Path(*path.split("/"))
    if not place.is_file():
        raise InvalidModelFile(f"The embedded model {path} is missing here.", hint="install edgespec again")
    return PackagedGguf(place)


def _on_hub(reference: HubReference, backend: FileBackend, hub: Hub) -> Source:
    model = hub.cached(reference) or hub.resolve(reference)
    if backend == "mlx" and model.kind == "mlx":
        return HubMlx(model)
    if backend == "llamacpp" and model.kind == "gguf":
        return HubGguf(model)
    kind, other = ("a GGUF", "llamacpp") if model.kind == "gguf" else ("an MLX", "mlx")
    raise UnknownModel(f"{reference} is {kind} model, which {backend} does not open.", hint=f"use --backend {other}")
