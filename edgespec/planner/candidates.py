"""Models that may be recommended: aliases of the registry, and repositories that a search of the hub finds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from edgespec.backends import FileBackend
from edgespec.hub.hub import Hub
from edgespec.hub.reference import HubRepo, Reference
from edgespec.hub.search import FoundRepo, search_repos
from edgespec.registry.about import About, Task
from edgespec.registry.schema import Acceptance, Entry, Pair, Registry

_HUB_RESULTS = 12
_TAGS: dict[Task, tuple[str, ...]] = {"chat": ("conversational",), "code": ("code",), "reasoning": ("reasoning",)}
_OTHER: dict[FileBackend, FileBackend] = {"llamacpp": "mlx", "mlx": "llamacpp"}


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
