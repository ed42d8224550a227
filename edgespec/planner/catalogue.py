"""The models to choose from: aliases, other downloads, models of other programs, and what a search of the hub finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from edgespec.backends import FileBackend
from edgespec.backends.devices import Memory
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import EdgespecError
from edgespec.formats.mlx_folder import read_config
from edgespec.hub.cache import CachedModel, HubRepo, Kind, LocalPath, Reference, RemoteModel
from edgespec.hub.errors import HubUnreachable
from edgespec.hub.hub import Hub, search_repos
from edgespec.planner.memory import ModelFacts, describe_model, guess_facts, read_facts
from edgespec.planner.speed import ASSUMED, COMMON, FasterType, MachineSpeed, SpeedEstimate, load_speed, measure_speed
from edgespec.registry.external_models import find_external_models, read_gguf_size
from edgespec.registry.resolve import (
    LocalModel,
    detect_local_backend,
    find_local,
    is_head,
    read_parts,
    resolve_pair,
    resolve_source,
)
from edgespec.registry.schema import About, Acceptance, Registry, Task
from edgespec.units import gib

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
    size        bytes of all files; None unless it is completely downloaded
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
        target = _stat(model.reference, model.path, model.kind, model.size)
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
        target = _stat(LocalPath(other.path), other.path, "gguf", other.size)
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
    return _stat(reference, path, source.kind, size) if path and size else Component(reference)


def _stat(reference: Reference, path: Path, kind: Kind, size: int) -> Component:
    """The model at `path`; without its files where they were removed in the meantime."""
    try:
        return Component(reference, path, kind, size, path.stat().st_mtime_ns)
    except OSError:
        return Component(reference)


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
        return describe_model(read_parts(path))
    except _UNUSABLE:
        return None


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


# Which models suit this machine: those of the registry and of a search of the hub, by fit and expected speed.
#
# The order: models that fit and are fast enough, the largest first, since larger ones answer better; then slower ones,
# the fastest first; then those whose speed is not known, the largest first; then those that do not fit, the smallest
# first.


FAST_ENOUGH = 20.0  # tokens/s, 50 ms a token
_OVERSIZE = 1.5  # of the memory: headers of larger models are not read
_REQUESTS = 8  # at a time
_WORDS = ((1, "toy"), (3, "simple"), (7, "fair"), (20, "good"), (60, "strong"))  # below so many billion parameters

Use = Literal["chat", "code", "agents", "documents", "reasoning"]
TASKS: dict[Use, Task] = {
    "chat": "chat", "code": "code", "agents": "code", "documents": "chat", "reasoning": "reasoning",
}  # fmt: skip
_LOOKUPS = "edits of a file ran at 2.11 times plain decoding with it, at 1.59 without (1B Q4_0)"
DRAFTERS: dict[Use, str] = {  # figures of docs/benchmarks.md, "Earlier texts"
    "chat": "a small draft model or a trained head, which `auto` takes",
    "code": f"`auto`, which has the n-gram lookup in your past chats (suffix): {_LOOKUPS}",
    "agents": f"`--draft ngram+suffix`, n-gram lookup in the conversation and in your past chats: {_LOOKUPS}",
    "documents": "`--draft ngram`: a draft model reads the document too",
    "reasoning": "a trained head or a draft model, which `auto` takes",
}
Group = Literal["fast", "slow", "unknown", "too large"]
GROUPS: dict[Group, str] = {
    "fast": f"Fit, and fast enough ({FAST_ENOUGH:.0f} tokens/s or more)",
    "slow": "Fit, slower",
    "unknown": "Fit, speed not known before a download",
    "too large": "Too large for the free memory",
}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A model with what is expected of it here.

    facts     None where nothing says how large it is
    draft     those of the draft model
    missing   bytes to download, with the draft model; 0 if it is here, None where nothing says
    expected  None where the speed cannot be estimated
    faster    another type of weights of about the same size that is much faster here
    problem   why nothing could be read from the hub, else empty
    """

    candidate: CatalogueEntry
    facts: ModelFacts | None
    draft: ModelFacts | None
    missing: int | None
    fit: FitLevel | None = None
    expected: SpeedEstimate | None = None
    faster: FasterType | None = None
    problem: str = ""

    @property
    def plain(self) -> float | None:
        """Tokens/s of plain decoding; None where it cannot be estimated."""
        return 1 / self.expected.rows[1] if self.expected else None

    @property
    def drafted(self) -> tuple[float, float] | None:
        """Tokens/s with the draft model, at low and high acceptance; None without one, or not estimated."""
        if self.expected is None or self.plain is None or self.expected.draft_s is None:
            return None
        low, high = (self.expected.speculative(each)[1] for each in self.candidate.acceptance or ASSUMED)
        return self.plain * low, self.plain * high

    @property
    def group(self) -> Group:
        """Models of one group are comparable."""
        if self.fit == "does not fit":
            return "too large"
        if self.plain is None:
            return "unknown"
        return "fast" if max(self.plain, self.drafted[0] if self.drafted else 0.0) >= FAST_ENOUGH else "slow"

    @property
    def parameters(self) -> float | None:
        """The number of parameters, in billions."""
        return (self.facts.parameters if self.facts else None) or self.candidate.about.parameters

    @property
    def quality(self) -> str:
        """A word for what to expect of the answers, by the number of parameters; with few bits, also these."""
        if self.parameters is None:
            return ""
        word = next((word for size, word in _WORDS if self.parameters < size), "best")
        bits = 8 * self.facts.weights / (self.parameters * 1e9) if self.facts else 4.0
        return word if bits >= 4 else f"{word}, {bits:.0f} bit"

    def to_dict(self) -> dict[str, Any]:
        """Returns what JSON has; sizes in bytes, parameters in billions."""
        candidate, facts = self.candidate, self.facts
        return {
            "name": candidate.name,
            "backend": candidate.backend,
            "origin": "registry" if candidate.downloads is None else "hub",
            "description": candidate.description,
            "tasks": list(candidate.about.tasks),
            "license": candidate.about.license,
            "quality": self.quality,
            "parameters": None if self.parameters is None else round(self.parameters, 3),
            "group": self.group,
            "fit": self.fit,
            "download_bytes": self.missing,
            "memory_bytes": facts.needed if facts else None,
            "estimated_sizes": facts is None or not facts.exact,
            "plain_tokens_per_second": self.plain,
            "drafted_tokens_per_second": self.drafted,
            "faster_type": {"name": self.faster.name, "gain": round(self.faster.gain, 2)} if self.faster else None,
            "draft": candidate.draft_by or "ngram",
            "hub_downloads": candidate.downloads,
            "problem": self.problem or None,
        }


@dataclass(frozen=True, slots=True)
class Recommendations:
    """Models in order; `notices` say what could not be asked, `speed` is what is measured of this machine."""

    models: Sequence[Recommendation]
    notices: Sequence[str] = ()
    speed: MachineSpeed = field(default_factory=MachineSpeed)

    @property
    def advice(self) -> list[str]:
        """Sentences that name the models for which a file with another type of weights would be much faster."""
        by_types: dict[tuple[str, str], list[Recommendation]] = {}
        for each in self.models:
            if each.faster is not None:
                by_types.setdefault((each.faster.instead_of, each.faster.name), []).append(each)
        return [_advise(models) for models in by_types.values()]


@dataclass(slots=True)
class Recommender:
    """Reads sizes and headers, measures this machine, and sorts.

    report          is told in words what is being done
    measures_again  what is stored of this machine is replaced, such as figures of a time when it was busy
    """

    registry: Registry
    hub: Hub
    backend: FileBackend
    memory: Memory
    report: Callable[[str], None] = lambda text: None
    check: CheckCancelled = lambda: None
    measures_again: bool = False
    _speed: MachineSpeed = field(default_factory=load_speed)
    _unreachable: str = ""  # why the hub is not asked

    def recommend(self, query: Query, *, measure: bool = True) -> Recommendations:
        """The models that match `query`. Without `measure`, only stored measurements are used. Raises Cancelled."""
        self._unreachable = "Offline mode is on." if self.hub.offline else ""
        candidates, notices = [*list_aliases(self.registry, self.hub, self.backend, query)], []
        if query.text or query.task:
            known = {getattr(each.target.reference, "repo", None) for each in candidates}
            try:
                self.report(f"searching {self.hub.endpoint} …")
                found = search_hub(self.hub, self.backend, query)
                candidates += [each for each in found if each.name not in known]
            except HubUnreachable as error:
                self._unreachable = error.message
            except EdgespecError as error:
                notices.append(f"The hub was not searched: {error.message}")
        self.report(f"reading sizes and headers of {len(candidates)} models …")
        with ThreadPoolExecutor(_REQUESTS) as pool:
            sized = list(pool.map(self._size, candidates))
        if self._unreachable:
            notices.append(f"{self._unreachable} This is the registry alone; sizes with ~ are estimates.")
        limit = query.max_bytes
        kept = [each for each in sized if limit is None or each.missing is None or each.missing <= limit]
        return Recommendations(sorted(self._judge(kept, measure=measure), key=_rank), notices, self._speed)

    def estimate(self, alias: str, *, measure: bool = True) -> Recommendation | None:
        """What is expected of one alias of the registry; None where there is no such alias. Raises Cancelled."""
        listed = list_aliases(self.registry, self.hub, self.backend, Query(alias))
        found = [self._size(each) for each in listed if each.name == alias]
        return next(iter(self._judge(found, measure=measure)), None)

    def _size(self, candidate: CatalogueEntry) -> Recommendation:
        """The sizes of a model and of its draft, from headers if they may fit; else from files or parameters."""
        self.check()
        guessed, draft = guess_facts(candidate.about, candidate.target.reference), None
        if candidate.draft is not None:
            draft = guess_facts(candidate.draft_about, candidate.draft.reference)
        weights = [each.weights for each in (guessed, draft) if each]
        guess = Recommendation(candidate, guessed, draft, sum(weights) if guessed else None)
        is_huge = guessed is not None and guessed.weights > _OVERSIZE * self.memory.usable
        if (is_huge or self._unreachable) and not candidate.target.here:
            return guess
        try:
            facts, missing = self._read(candidate.target, candidate.backend, candidate.about)
            if candidate.draft is not None:
                draft, more = self._read(candidate.draft, candidate.backend, candidate.draft_about)
                missing += more
        except HubUnreachable as error:
            self._unreachable = self._unreachable or error.message
            return guess
        except EdgespecError as error:
            return replace(guess, problem=error.message)
        return Recommendation(candidate, facts, draft, missing)

    def _read(self, model: Component, backend: FileBackend, about: About) -> tuple[ModelFacts | None, int]:
        """The facts of a model and the bytes to download. Raises EdgespecError."""
        source = resolve_source(model.reference, backend, self.hub)
        if isinstance(source, LocalModel):
            return read_facts(source, self.hub), 0
        size = source.size
        missing = 0 if model.here else size
        if size > _OVERSIZE * self.memory.usable:
            return guess_facts(about, model.reference, size), missing
        return read_facts(source, self.hub), missing

    def _judge(self, models: Sequence[Recommendation], *, measure: bool) -> list[Recommendation]:
        """`models` with what is expected of them, after a measurement of the types of weights of those that may fit."""
        facts = [facts for each in models for facts in (each.facts, each.draft) if facts]
        if measure:
            kinds = {kind for each in facts if each.needed <= self.memory.usable for kind in each.read}
            self._speed = measure_speed(COMMON | kinds, self.report, self.check, again=self.measures_again)
        return list(map(self._estimate, models))

    def _estimate(self, sized: Recommendation) -> Recommendation:
        target, draft = sized.facts, sized.draft
        if target is None:
            return sized
        fit = rate_fit(target.needed, draft.needed if draft else 0, self.memory)
        # on several devices a part is computed elsewhere; MLX has weights of other types
        is_split = 0 < self.memory.own_device_bytes < target.needed
        if fit == "does not fit" or is_split or sized.candidate.backend == "mlx":
            return replace(sized, fit=fit)
        drafted = draft.read if draft and not target.mixture else None  # rows of a mixture read more than one row does
        expected, faster = self._speed.estimate(target.read, drafted), self._speed.find_faster(target.read)
        return replace(sized, fit=fit, expected=expected, faster=faster)


def _advise(models: Sequence[Recommendation]) -> str:
    """One sentence for models that have the same type of weights and the same faster one."""
    gains = [each.faster for each in models if each.faster is not None]
    best = max(gains, key=lambda each: each.gain)
    names = [each.candidate.name for each in models]
    return f"{best} of {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}."


def _rank(model: Recommendation) -> tuple[int, float, str]:
    order, size = [*GROUPS].index(model.group), model.parameters or 0.0
    key = {"slow": -(model.plain or 0.0), "too large": size}.get(model.group, -size)
    return order, key, model.candidate.name


def format_download(model: Recommendation) -> str:
    """What is missing here, with ~ for an estimate."""
    if model.missing is None:
        return "?"
    about = "" if model.facts is not None and model.facts.exact else "~"
    return f"{about}{gib(model.missing)}" if model.missing else "here"


def format_plain(model: Recommendation) -> str:
    """Tokens/s of plain decoding."""
    return "" if model.plain is None else _format_speed(model.plain)


def format_drafted(model: Recommendation) -> str:
    """Tokens/s with the draft model, else what drafts."""
    if model.drafted is None or model.plain is None:
        names = {"": "n-grams", "model": "draft model", "gemma4-assistant": "mtp head"}
        return names.get(model.candidate.draft_by, f"{model.candidate.draft_by} head")
    low, high = model.drafted
    return "no gain" if high <= model.plain * 1.02 else f"{_format_speed(low)}-{_format_speed(high)}"


def _format_speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 10 else f"{tokens_per_second:.1f}"
