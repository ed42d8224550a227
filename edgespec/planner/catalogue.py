"""The models to choose from: aliases, other downloads, and models of other programs.

Sends no request: sizes and memory estimates are of local files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from edgespec.backends import FileBackend
from edgespec.backends.devices import Memory
from edgespec.backends.options import DEFAULT_CONTEXT
from edgespec.errors import EdgespecError
from edgespec.formats.gguf import join_parts
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.head_file import ModelMetadata
from edgespec.formats.mlx_folder import read_config
from edgespec.hub.cache import CachedModel, HubRepo, Kind, LocalPath, Reference, RemoteModel, list_parts
from edgespec.hub.hub import FoundRepo, Hub, search_repos
from edgespec.planner.memory import MemoryEstimate, estimate_memory
from edgespec.registry.external_models import find_external_models, read_gguf_size
from edgespec.registry.resolve import (
    detect_local_backend,
    find_local,
    is_head,
    resolve_pair,
    resolve_source,
)
from edgespec.registry.schema import About, Acceptance, Entry, Pair, Registry, Task

FitLevel = Literal["fits", "tight", "does not fit"]
Origin = Literal["alias", "cache", "opened", "elsewhere"]

# The part of the free memory that must stay free; otherwise the fit is tight.
_MIN_HEADROOM = 1 / 8

_OTHER: dict[FileBackend, FileBackend] = {"llamacpp": "mlx", "mlx": "llamacpp"}
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
        """Whether nothing has to be downloaded."""
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
    verified     of an alias: the file names were seen in a public source
    fit          whether the local files fit in memory: 'tight' if little memory stays free or the draft model does not
                 fit with the target; None if the target is not downloaded
    """

    name: str
    origin: Origin
    opens: str
    backend: FileBackend
    description: str
    target: Component
    draft: Component | None
    verified: bool
    fit: FitLevel | None

    @property
    def here(self) -> bool:
        """Whether target and draft need no download."""
        return self.target.here and (self.draft is None or self.draft.here)


def build_catalogue(
    registry: Registry,
    hub: Hub,
    backend: FileBackend,
    memory: Memory,
    *,
    context: int = DEFAULT_CONTEXT,
    opened: Iterable[Path] = (),
) -> list[CatalogueEntry]:
    """Aliases in file order, then other downloads (last used first), then those of the files and folders `opened` that
    are in no other group, by their names, then models of other programs; no trained heads.

    An alias without a model for `backend` has the other runtime's. Fits are for `context` tokens, or the trained
    context if that is shorter. The first call reads the header of every local model. Raises CacheError.
    """
    local = replace(hub, offline=True)
    found: list[CatalogueEntry] = []

    def add(
        name: str,
        origin: Origin,
        runtime: FileBackend,
        target: Component,
        draft: Component | None = None,
        *,
        opens: str | None = None,
        description: str = "",
        verified: bool = False,
    ) -> None:
        fit = _check_fit(target, draft, memory, context)
        found.append(CatalogueEntry(name, origin, opens or name, runtime, description, target, draft, verified, fit))

    for alias in registry.entries.values():
        chosen = backend if alias.pair(backend) else _OTHER[backend]
        if pair := alias.pair(chosen):
            target = _to_component(pair.target, chosen, local)
            draft = _to_component(pair.draft, chosen, local) if pair.draft else None
            add(alias.alias, "alias", chosen, target, draft, description=alias.description, verified=pair.verified)
    shown = {part.files.path for entry in found for part in (entry.target, entry.draft) if part and part.files}
    cached = sorted(hub.list_models(), key=lambda model: -model.last_used_s)
    for model in cached:
        files = _stat(model.path, model.kind, model.size)
        if files and model.path not in shown and not _is_head(files):
            runtime: FileBackend = "mlx" if model.kind == "mlx" else "llamacpp"
            draft = _find_paired_draft(model, runtime, registry, local)
            add(str(model.reference), "cache", runtime, Component(model.reference, files), draft)
    shown |= {model.path for model in cached}
    others = find_external_models(exclude=shown)
    for path in opened:
        own = detect_local_backend(path, prefer_mlx=backend == "mlx")
        component = _to_component(LocalPath(path), own, local)
        if component.here and path not in shown and all(path != other.path for other in others):
            add(path.name, "opened", own, component, opens=str(path))
    for other in others:
        if files := _stat(other.path, "gguf", other.size):
            add(other.name, "elsewhere", "llamacpp", Component(LocalPath(other.path), files), opens=str(other.path))
    return found


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


def _check_fit(target: Component, draft: Component | None, memory: Memory, context: int) -> FitLevel | None:
    estimates = _estimate(target.files, draft.files if draft else None, context) if target.files else None
    if estimates is None:
        return None
    alone, drafting = estimates
    return rate_fit(alone.total, drafting.total if drafting else 0, memory)


@lru_cache(maxsize=1024)  # headers with large vocabularies take a tenth of a second each
def _estimate(target: Files, draft: Files | None, context: int) -> tuple[MemoryEstimate, MemoryEstimate | None] | None:
    """Memory of both; None if the target's header or config is unusable, no draft if only the draft's is."""
    try:
        metadata = _read_metadata(target)
        tokens = min(metadata.trained_context or context, context)
        alone = estimate_memory(metadata, tokens)
    except _UNUSABLE:
        return None
    try:
        return alone, estimate_memory(_read_metadata(draft), tokens) if draft else None
    except _UNUSABLE:
        return alone, None


def _read_metadata(files: Files) -> ModelMetadata:
    if files.kind == "mlx":
        return read_config(files.path, files.path.name, _weight_bytes(files.path))
    return join_parts([read_file(files.path.with_name(name)) for name in list_parts(files.path.name)])


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


# Models that may be recommended: aliases of the registry, and repositories that a search of the hub finds.


_HUB_RESULTS = 12
_TAGS: dict[Task, tuple[str, ...]] = {"chat": ("conversational",), "code": ("code",), "reasoning": ("reasoning",)}


@dataclass(frozen=True, slots=True)
class Query:
    """What to recommend: `text` is searched in names, `max_bytes` limits the download."""

    text: str = ""
    task: Task | None = None
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model whose size is not known yet.

    name        an alias or a repository, as `--model` takes it
    draft       a draft model of the registry
    draft_about  what the registry says of that draft's weights, where another entry has them
    draft_by    what drafts besides n-grams: 'model', or the kind of a trained head; else empty
    acceptance  of the draft model; None where nothing was measured
    downloads   of the last month, of a repository that a search has found; None of an alias
    """

    name: str
    backend: FileBackend
    target: Reference
    draft: Reference | None
    draft_by: str
    about: About
    description: str
    acceptance: Acceptance | None = None
    downloads: int | None = None
    draft_about: About = field(default_factory=About)


def list_candidates(registry: Registry, backend: FileBackend, query: Query) -> Iterable[Candidate]:
    """The aliases that match the words and the task of `query`; for `backend`, or for the other runtime."""
    words = query.text.casefold().split()
    for entry in registry.entries.values():
        named = f"{entry.alias} {entry.description}".casefold()
        if not all(word in named for word in words) or (query.task and query.task not in entry.about.tasks):
            continue
        chosen = backend if entry.pair(backend) else _OTHER[backend]
        if pair := entry.pair(chosen):
            yield _from_registry(entry, pair, chosen, registry)


def search_candidates(hub: Hub, backend: FileBackend, query: Query) -> list[Candidate]:
    """The most downloaded repositories that match `query`. Raises HubError."""
    tags = _TAGS[query.task] if query.task else ()
    found = search_repos(hub, query.text, "gguf" if backend == "llamacpp" else "mlx", tags=tags, limit=_HUB_RESULTS)
    return [_from_hub(each, backend) for each in found]


def _from_registry(entry: Entry, pair: Pair, backend: FileBackend, registry: Registry) -> Candidate:
    by = "model" if pair.draft else pair.head_kind or ("mtp" if pair.with_head else "")
    weights = entry.originals.draft if pair.draft else None
    others = (each.about for each in registry.entries.values() if weights and each.originals.target == weights)
    return Candidate(
        entry.alias,
        backend,
        pair.target,
        pair.draft,
        by,
        entry.about,
        entry.description,
        pair.acceptance,
        draft_about=next(others, About()),
    )


def _from_hub(found: FoundRepo, backend: FileBackend) -> Candidate:
    described = f"{found.downloads:,} downloads in the last month"
    about = About(license=found.license)
    return Candidate(found.repo, backend, HubRepo(found.repo), None, "", about, described, downloads=found.downloads)
