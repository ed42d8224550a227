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
class Component:
    """A target or a draft model.

    path        its GGUF file or MLX folder; None unless it is completely downloaded
    size        bytes of all files, as long as it is downloaded
    changed_ns  when the files changed last
    """

    reference: Reference
    path: Path | None = None
    kind: Kind = "gguf"
    size: int | None = None
    changed_ns: int = 0

    @property
    def here(self) -> bool:
        """Tells whether nothing has to be downloaded."""
        return self.path is not None


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
    shown = {part.path for entry in found for part in (entry.target, entry.draft) if part and part.path}
    cached = sorted(hub.list_models(), key=lambda model: -model.last_used_s)
    for model in cached:
        target = _stat(Component(model.reference, model.path, model.kind, model.size))
        if target.here and model.path not in shown and not _is_head(target):
            runtime: FileBackend = "mlx" if model.kind == "mlx" else "llamacpp"
            draft = _find_paired_draft(model, runtime, registry, local)
            name = str(model.reference)
            found.append(CatalogueEntry(name, "cache", name, runtime, target, draft))
    shown |= {model.path for model in cached}
    others = find_external_models(exclude=shown)
    for path in opened:
        own = detect_local_backend(path, prefer_mlx=backend == "mlx")
        target = _find_component(LocalPath(path), own, local)
        if target.here and path not in shown and all(path != other.path for other in others):
            found.append(CatalogueEntry(path.name, "opened", str(path), own, target))
    for other in others:
        target = _stat(Component(LocalPath(other.path), other.path, size=other.size))
        if target.here:
            found.append(CatalogueEntry(other.name, "elsewhere", str(other.path), "llamacpp", target))
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
                _find_component(pair.target, chosen, local),
                _find_component(pair.draft, chosen, local) if pair.draft else None,
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
            repo,
            "hub",
            repo,
            backend,
            _find_component(HubRepo(repo), backend, local),
            description=f"{downloads:,} downloads in the last month",
            about=About(license=license_),
            downloads=downloads,
        )
        for repo, downloads, license_ in found
    ]


def rate_fit(needed: int, added: int, memory: Memory) -> FitLevel:
    """The fit of a target that needs `needed` bytes, and `added` bytes more with its draft model."""
    if memory.usable - needed - added >= _MIN_HEADROOM * memory.usable:
        return "fits"
    return "tight" if needed <= memory.usable else "does not fit"


def _find_paired_draft(model: CachedModel, backend: FileBackend, registry: Registry, local: Hub) -> Component | None:
    """The draft model that is loaded with a download: that of an alias with the same repository."""
    try:
        draft = resolve_pair(str(model.reference), backend, registry, local).models.draft
    except _UNUSABLE:  # removed in the meantime
        return None
    return _find_component(draft, backend, local) if draft else None


def _find_component(reference: Reference, backend: FileBackend, local: Hub) -> Component:
    """The model of `reference` for `backend`, with its files if all are local; `local` sends no request."""
    try:
        source = resolve_source(reference, backend, local)
        path = find_local(source, local)
        if isinstance(source, RemoteModel):
            size = source.size
        else:
            size = _weight_bytes(source.path) if source.kind == "mlx" else read_gguf_size(source.path) or 0
    except _UNUSABLE:
        return Component(reference)
    return _stat(Component(reference, path if size else None, source.kind, size))


def _stat(model: Component) -> Component:
    """`model` with the time of its last change; without its files where they were removed in the meantime."""
    try:
        return replace(model, changed_ns=model.path.stat().st_mtime_ns if model.path else 0)
    except OSError:
        return Component(model.reference)


@lru_cache(maxsize=1024)
def _is_head(model: Component) -> bool:
    return model.path is not None and is_head(model.path)


def _check_fit(target: Component, draft: Component | None, memory: Memory) -> FitLevel | None:
    facts, drafted = _read_facts(target), _read_facts(draft) if draft else None
    if facts is None:
        return None
    return rate_fit(facts.needed, drafted.needed if drafted else 0, memory)


@lru_cache(maxsize=1024)  # headers with large vocabularies take a tenth of a second each
def _read_facts(model: Component) -> ModelFacts | None:
    """Reads the header or config of a local model; None where it is unusable."""
    if (path := model.path) is None:
        return None
    try:
        if model.kind == "mlx":
            return describe_model(read_config(path, path.name, _weight_bytes(path)))
        return describe_model(join_parts([read_file(path.with_name(name)) for name in list_parts(path.name)]))
    except _UNUSABLE:
        return None


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
