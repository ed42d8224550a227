"""What there is to choose from: aliases, downloads that no alias shows, and models of other programs.

No request is sent: sizes and prices are those of files that are here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from edgespec.backends import FileBackend
from edgespec.backends.devices import Memory
from edgespec.backends.options import DEFAULT_CONTEXT
from edgespec.errors import EdgespecError
from edgespec.formats.gguf import join_parts
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.metadata import ModelMetadata
from edgespec.formats.mlx_folder import read_config
from edgespec.hub.cache import CachedModel, snapshot_path
from edgespec.hub.file_selection import Kind, list_parts
from edgespec.hub.hub import Hub
from edgespec.hub.reference import LocalPath, Reference
from edgespec.planner.memory import Fit, MemoryEstimate, estimate_memory
from edgespec.registry.external_models import find_external_models, read_gguf_size
from edgespec.registry.resolve import HubGguf, HubMlx, LocalMlx, resolve_source, resolve_pair
from edgespec.registry.schema import Registry

FitLevel = Literal["fits", "tight", "does not fit"]
Origin = Literal["alias", "cache", "elsewhere"]

# The part of the free memory that has to stay free, or the fit is tight.
COMFORT = 1 / 8

_OTHER: dict[FileBackend, FileBackend] = {"llamacpp": "mlx", "mlx": "llamacpp"}
_UNUSABLE = (EdgespecError, OSError, OverflowError)  # the last from a config with absurd numbers


@dataclass(frozen=True, slots=True)
class Files:
    """A model on this machine: the GGUF file to open or the MLX folder, bytes of all files, and when it changed."""

    path: Path
    kind: Kind
    size: int
    changed_ns: int


@dataclass(frozen=True, slots=True)
class Component:
    """A target or its draft model; `files` is None where not all of them are here."""

    reference: Reference
    files: Files | None

    @property
    def here(self) -> bool:
        """True where nothing has to be downloaded."""
        return self.files is not None

    @property
    def size(self) -> int | None:
        """Bytes on disk, None where not all of it is here."""
        return self.files.size if self.files else None


@dataclass(frozen=True, slots=True)
class Entry:
    """One model to choose.

    name         what to show
    opens        what `--model` takes
    backend      the runtime for it
    draft        the draft model that the registry pairs with it
    verified     of an alias: the file names were seen in a public source
    fit          whether what is here of it fits in memory: 'tight' where little stays free or the draft model has no
                 room beside the target; None where nothing is known before the download
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
        """True where target and draft need no download."""
        return self.target.here and (self.draft is None or self.draft.here)


def build_catalogue(
    registry: Registry, hub: Hub, backend: FileBackend, memory: Memory, *, context: int = DEFAULT_CONTEXT
) -> list[Entry]:
    """Aliases in file order, then other downloads (last used first), then models of other programs; no request.

    An alias without a model for `backend` comes with the other runtime's. Fits are for `context` tokens, or as many as
    the model was trained for. The first call reads the header of every model that is here. Raises CacheError.
    """
    local = replace(hub, offline=True)
    found: list[Entry] = []

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
        fit = _room(target, draft, memory, context)
        found.append(Entry(name, origin, opens or name, runtime, description, target, draft, verified, fit))

    for alias in registry.entries.values():
        chosen = backend if alias.pair(backend) else _OTHER[backend]
        if pair := alias.pair(chosen):
            parts = (_part(pair.target, chosen, local), _part(pair.draft, chosen, local) if pair.draft else None)
            add(alias.alias, "alias", chosen, *parts, description=alias.description, verified=pair.verified)
    shown = {part.files.path for entry in found for part in (entry.target, entry.draft) if part and part.files}
    cached = sorted(hub.list_models(), key=lambda model: -model.last_used_s)
    for model in cached:
        files = _stamped(model.path, model.kind, model.size)
        if files and model.path not in shown:
            runtime: FileBackend = "mlx" if model.kind == "mlx" else "llamacpp"
            draft = _paired(model, runtime, registry, local)
            add(str(model.reference), "cache", runtime, Component(model.reference, files), draft)
    for other in find_external_models(exclude=[*shown, *(model.path for model in cached)]):
        if files := _stamped(other.path, "gguf", other.size):
            add(other.name, "elsewhere", "llamacpp", Component(LocalPath(other.path), files), opens=str(other.path))
    return found


def filter_entries(entries: Iterable[Entry], text: str) -> list[Entry]:
    """The entries whose name or description holds every word of `text`, in either case."""
    words = text.casefold().split()
    return [each for each in entries if all(word in f"{each.name} {each.description}".casefold() for word in words)]


def _part(reference: Reference, backend: FileBackend, local: Hub) -> Component:
    return Component(reference, _files(reference, backend, local))


def _paired(model: CachedModel, backend: FileBackend, registry: Registry, local: Hub) -> Component | None:
    """The draft model that comes along when a download is opened: that of an alias with the same repository."""
    try:
        draft = resolve_pair(str(model.reference), backend, registry, local).draft
    except _UNUSABLE:  # removed meanwhile
        return None
    return _part(draft, backend, local) if draft else None


def _files(reference: Reference, backend: FileBackend, local: Hub) -> Files | None:
    """What `reference` means for `backend`, if all of it is here; `local` is a hub that sends no request."""
    try:
        source = resolve_source(reference, backend, local)
        if isinstance(source, HubGguf | HubMlx):
            first = snapshot_path(local.cache_dir, source.model, source.model.files[0].path)
            path, size = first if isinstance(source, HubGguf) else first.parent, source.model.size
        else:
            path = source.path
            size = _weight_bytes(path) if isinstance(source, LocalMlx) else read_gguf_size(path) or 0
    except _UNUSABLE:
        return None
    return _stamped(path, "mlx" if isinstance(source, HubMlx | LocalMlx) else "gguf", size) if size else None


def _stamped(path: Path, kind: Kind, size: int) -> Files | None:
    try:
        return Files(path, kind, size, path.stat().st_mtime_ns)
    except OSError:  # removed meanwhile
        return None


def _room(target: Component, draft: Component | None, memory: Memory, context: int) -> FitLevel | None:
    prices = _prices(target.files, draft.files if draft else None, context) if target.files else None
    if prices is None:
        return None
    both = Fit(context, *prices, memory)
    if both.headroom >= COMFORT * memory.usable:
        return "fits"
    return "tight" if Fit(context, prices[0], None, memory).headroom >= 0 else "does not fit"


@lru_cache(maxsize=1024)  # headers with large vocabularies take a tenth of a second each
def _prices(target: Files, draft: Files | None, context: int) -> tuple[MemoryEstimate, MemoryEstimate | None] | None:
    """What both take in memory; None where a header or config cannot be used, without a draft where only its cannot."""
    try:
        facts = _facts(target)
        tokens = min(facts.trained_context or context, context)
        alone = estimate_memory(facts, tokens)
    except _UNUSABLE:
        return None
    try:
        return alone, estimate_memory(_facts(draft), tokens) if draft else None
    except _UNUSABLE:
        return alone, None


def _facts(files: Files) -> ModelMetadata:
    if files.kind == "mlx":
        return read_config(files.path, files.path.name, _weight_bytes(files.path))
    return join_parts([read_file(files.path.with_name(name)) for name in list_parts(files.path.name)])


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
