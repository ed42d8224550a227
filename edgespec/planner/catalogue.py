"""The models to choose from: aliases, other downloads, models of other programs, and what a search of the hub finds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from edgespec.backends import FileBackend
from edgespec.backends.devices import Memory
from edgespec.errors import EdgespecError
from edgespec.formats.gguf import join_parts
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.head_file import ModelMetadata
from edgespec.formats.mlx_folder import read_config
from edgespec.hub.cache import CachedModel, HubRepo, Kind, LocalPath, Reference, RemoteModel, list_parts
from edgespec.hub.hub import Hub, search_repos
from edgespec.planner.memory import ModelFacts, describe_model
from edgespec.registry.external_models import find_external_models, read_gguf_size
from edgespec.registry.resolve import (
    detect_local_backend,
    find_local,
    is_head,
    resolve_pair,
    resolve_source,
)
from edgespec.registry.schema import About, Acceptance, Registry, Task

FitLevel = Literal["fits", "tight", "does not fit"]
Origin = Literal["alias", "cache", "opened", "elsewhere", "hub"]

# The part of the free memory that must stay free; otherwise the fit is tight.
_MIN_HEADROOM = 1 / 8

_OTHER: dict[FileBackend, FileBackend] = {"llamacpp": "mlx", "mlx": "llamacpp"}
_HUB_RESULTS = 12
_TAGS: dict[Task, tuple[str, ...]] = {"chat": ("conversational",), "code": ("code",), "reasoning": ("reasoning",)}
_UNUSABLE = (EdgespecError, OSError, OverflowError)  # OverflowError: a config with absurd numbers


@dataclass(frozen=True, slots=True)
class Files:
    """A local model: its GGUF file or MLX folder, the bytes of all files, and the time of the last change."""

    path: Path
    kind: Kind
    size: int
    changed_ns: int


@dataclass(frozen=True, slots=True)
class Component:
    """A target or a draft model; `files` is None unless it is completely downloaded."""

    reference: Reference
    files: Files | None

    @property
    def here(self) -> bool:
        """Tells whether nothing has to be downloaded."""
        return self.files is not None

    @property
    def size(self) -> int | None:
        """Bytes on disk; None unless completely downloaded."""
        return self.files.size if self.files else None


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One model to choose.

    name         the name to show
    opens        the value for `--model`
    backend      its runtime
    draft        the draft model that the registry pairs with it
    draft_by     what the registry pairs with an alias: 'model', or the kind of a trained head; else empty
    acceptance   of the draft model; None where nothing was measured
    about        of an alias: what the registry says of its weights
    draft_about  of the draft's weights, where another entry has them
    verified     of an alias: the file names were seen in a public source
    downloads    of the last month, of a repository that a search has found; None of others
    fit          whether the local files fit in memory: 'tight' if little memory stays free or the draft model does not
                 fit with the target; None if the target is not downloaded
    """

    name: str
    origin: Origin
    opens: str
    backend: FileBackend
    target: Component
    draft: Component | None = None
    description: str = ""
    draft_by: str = ""
    acceptance: Acceptance | None = None
    about: About = field(default_factory=About)
    draft_about: About = field(default_factory=About)
    verified: bool = False
    downloads: int | None = None
    fit: FitLevel | None = None

    @property
    def here(self) -> bool:
        """Tells whether target and draft need no download."""
        return self.target.here and (self.draft is None or self.draft.here)


@dataclass(frozen=True, slots=True)
class Query:
    """What to recommend: `text` is searched in names, `max_bytes` limits the download."""

    text: str = ""
    task: Task | None = None
    max_bytes: int | None = None


def build_catalogue(
    registry: Registry,
    hub: Hub,
    backend: FileBackend,
    memory: Memory,
    *,
    opened: Iterable[Path] = (),
) -> list[CatalogueEntry]:
    """Aliases in file order, then other downloads (last used first), then those of the files and folders `opened` that
    are in no other group, by their names, then models of other programs; no trained heads.

    Fits are for 8,192 tokens, or the trained context if that is shorter. The first call reads the header of every local
    model. Raises CacheError.
    """
    local = replace(hub, offline=True)
    found = list(list_aliases(registry, local, backend))
    shown = {part.files.path for entry in found for part in (entry.target, entry.draft) if part and part.files}
    cached = sorted(hub.list_models(), key=lambda model: -model.last_used_s)
    for model in cached:
        files = _stat(model.path, model.kind, model.size)
        if files and model.path not in shown and not _is_head(files):
            runtime: FileBackend = "mlx" if model.kind == "mlx" else "llamacpp"
            draft = _find_paired_draft(model, runtime, registry, local)
            name = str(model.reference)
            found.append(CatalogueEntry(name, "cache", name, runtime, Component(model.reference, files), draft))
    shown |= {model.path for model in cached}
    others = find_external_models(exclude=shown)
    for path in opened:
        own = detect_local_backend(path, prefer_mlx=backend == "mlx")
        component = _to_component(LocalPath(path), own, local)
        if component.here and path not in shown and all(path != other.path for other in others):
            found.append(CatalogueEntry(path.name, "opened", str(path), own, component))
    for other in others:
        if files := _stat(other.path, "gguf", other.size):
            component = Component(LocalPath(other.path), files)
            found.append(CatalogueEntry(other.name, "elsewhere", str(other.path), "llamacpp", component))
    return [replace(each, fit=_check_fit(each.target, each.draft, memory)) for each in found]


def list_aliases(
    registry: Registry, hub: Hub, backend: FileBackend, query: Query = Query()
) -> Iterator[CatalogueEntry]:
    """The aliases that match the words and the task of `query`, for `backend` or else for the other runtime.

    Sends no request.
    """
    local, words = replace(hub, offline=True), query.text.casefold().split()
    for entry in registry.entries.values():
        named = f"{entry.alias} {entry.description}".casefold()
        if not all(word in named for word in words) or (query.task and query.task not in entry.about.tasks):
            continue
        chosen = backend if entry.pair(backend) else _OTHER[backend]
        if pair := entry.pair(chosen):
            weights = entry.originals.draft if pair.draft else None
            others = (each.about for each in registry.entries.values() if weights and each.originals.target == weights)
            yield CatalogueEntry(
                entry.alias,
                "alias",
                entry.alias,
                chosen,
                _to_component(pair.target, chosen, local),
                _to_component(pair.draft, chosen, local) if pair.draft else None,
                entry.description,
                "model" if pair.draft else pair.head_kind or ("mtp" if pair.with_head else ""),
                pair.acceptance,
                entry.about,
                next(others, About()),
                pair.verified,
            )


def search_hub(hub: Hub, backend: FileBackend, query: Query) -> list[CatalogueEntry]:
    """The most downloaded repositories that match `query`. Raises HubError."""
    tags, local = _TAGS[query.task] if query.task else (), replace(hub, offline=True)
    found = search_repos(hub, query.text, "gguf" if backend == "llamacpp" else "mlx", tags=tags, limit=_HUB_RESULTS)
    return [
        CatalogueEntry(
            each.repo,
            "hub",
            each.repo,
            backend,
            _to_component(HubRepo(each.repo), backend, local),
            description=f"{each.downloads:,} downloads in the last month",
            about=About(license=each.license),
            downloads=each.downloads,
        )
        for each in found
    ]


def rate_fit(needed: int, added: int, memory: Memory) -> FitLevel:
    """The fit of a target that needs `needed` bytes, and `added` bytes with its draft model; see Entry."""
    if memory.usable - needed - added >= _MIN_HEADROOM * memory.usable:
        return "fits"
    return "tight" if needed <= memory.usable else "does not fit"


def _to_component(reference: Reference, backend: FileBackend, local: Hub) -> Component:
    return Component(reference, _find_files(reference, backend, local))


def _find_paired_draft(model: CachedModel, backend: FileBackend, registry: Registry, local: Hub) -> Component | None:
    """The draft model that is loaded with a download: that of an alias with the same repository."""
    try:
        draft = resolve_pair(str(model.reference), backend, registry, local).draft
    except _UNUSABLE:  # removed in the meantime
        return None
    return _to_component(draft, backend, local) if draft else None


def _find_files(reference: Reference, backend: FileBackend, local: Hub) -> Files | None:
    """The files of `reference` for `backend` if all are local; `local` is a hub that sends no request."""
    try:
        source = resolve_source(reference, backend, local)
        path = find_local(source, local)
        if isinstance(source, RemoteModel):
            size = source.size
        else:
            size = _weight_bytes(source.path) if source.kind == "mlx" else read_gguf_size(source.path) or 0
    except _UNUSABLE:
        return None
    return _stat(path, source.kind, size) if path is not None and size else None


@lru_cache(maxsize=1024)
def _is_head(files: Files) -> bool:
    return is_head(files.path)


def _stat(path: Path, kind: Kind, size: int) -> Files | None:
    try:
        return Files(path, kind, size, path.stat().st_mtime_ns)
    except OSError:  # removed in the meantime
        return None


def _check_fit(target: Component, draft: Component | None, memory: Memory) -> FitLevel | None:
    facts = _read_facts(target.files) if target.files else None
    if facts is None:
        return None
    drafted = _read_facts(draft.files) if draft and draft.files else None
    return rate_fit(facts.needed, drafted.needed if drafted else 0, memory)


@lru_cache(maxsize=1024)  # headers with large vocabularies take a tenth of a second each
def _read_facts(files: Files) -> ModelFacts | None:
    """Reads a header or config; None where it is unusable."""
    try:
        return describe_model(_read_metadata(files))
    except _UNUSABLE:
        return None


def _read_metadata(files: Files) -> ModelMetadata:
    if files.kind == "mlx":
        return read_config(files.path, files.path.name, _weight_bytes(files.path))
    return join_parts([read_file(files.path.with_name(name)) for name in list_parts(files.path.name)])


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
