"""The models to choose from: aliases, other downloads, models of other programs, and what a search of the hub finds.

Each comes with what is expected of it on this machine. What is not downloaded is judged by the size of its files, and
without the hub by what the registry says; nothing of a file is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from edgespec.backends import FileBackend
from edgespec.cancel import cancellable, check_cancelled, current_check
from edgespec.errors import EdgespecError
from edgespec.machines.memory import Memory
from edgespec.models.cache import RemoteModel
from edgespec.models.external_models import find_external_models, read_gguf_size
from edgespec.models.file_selection import Kind
from edgespec.models.head_files import is_head
from edgespec.models.hub import Hub
from edgespec.models.hub_errors import HubUnreachable
from edgespec.models.hub_search import search_repos
from edgespec.models.mlx_speed import load_mlx_speed, measure_mlx_speed
from edgespec.models.references import HubFile, HubQuant, HubRepo, LocalPath, Reference
from edgespec.models.registry import About, Acceptance, Entry, Registry, Task
from edgespec.models.resolve import LocalModel, detect_local_backend, find_local, resolve_source
from edgespec.models.size_facts import ModelFacts, guess_facts, read_facts
from edgespec.models.speed import ASSUMED, COMMON, FasterType, MachineSpeed, SpeedEstimate, load_speed, measure_speed
from edgespec.units import gib

FitLevel = Literal["fits", "tight", "does not fit"]
Origin = Literal["alias", "cache", "opened", "elsewhere", "hub"]
T = TypeVar("T")

# The part of the free memory that must stay free; otherwise the fit is tight.
_MIN_HEADROOM = 1 / 8

_OTHER: dict[FileBackend, FileBackend] = {"llamacpp": "mlx", "mlx": "llamacpp"}
_HUB_RESULTS = 12
_REQUESTS = 8  # at a time
_TAGS: dict[Task, tuple[str, ...]] = {"chat": ("conversational",), "code": ("code",), "reasoning": ("reasoning",)}

FAST_ENOUGH = 20.0  # tokens/s, 50 ms a token
_WORDS = ((1, "toy"), (3, "simple"), (7, "fair"), (20, "good"), (60, "strong"))  # below so many billion parameters

Group = Literal["fast", "slow", "unknown", "too large"]
GROUPS: dict[Group, str] = {
    "fast": f"Fit, and fast enough ({FAST_ENOUGH:.0f} tokens/s or more)",
    "slow": "Fit, slower",
    "unknown": "Fit, speed not known before a download",
    "too large": "Too large for the free memory",
}


@dataclass(frozen=True, slots=True)
class Part:
    """A target or a draft model.

    path   its GGUF file or MLX folder; None unless it is completely downloaded
    size   bytes of all files; None if nothing says
    facts  read from a local model, else guessed; None if nothing says how large it is, or its header is damaged
    """

    reference: Reference
    path: Path | None = None
    size: int | None = None
    facts: ModelFacts | None = None

    @property
    def here(self) -> bool:
        """Tells whether nothing has to be downloaded."""
        return self.path is not None

    @property
    def missing(self) -> int | None:
        """Bytes to download; None if nothing says."""
        return 0 if self.here else self.size or (self.facts.weights if self.facts else None)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One model to choose, with what is expected of it here.

    name        the name to show
    opens       the value for `--model`
    backend     its runtime
    draft       of an alias: the draft model that the registry pairs with it
    draft_by    what the registry pairs with an alias: 'model', or the kind of a trained head; else empty
    acceptance  of the draft model; None if nothing was measured
    about       of an alias: its size, license and known tasks
    downloads   in the last month, if a search found the repository; else None
    problem     why nothing could be read from the hub, else empty
    fit         'tight' if little memory stays free or the draft model does not fit with the target
    expected    None if the speed cannot be estimated
    faster      another type of weights of about the same size that is much faster here
    """

    name: str
    origin: Origin
    opens: str
    backend: FileBackend
    target: Part
    draft: Part | None = None
    description: str = ""
    draft_by: str = ""
    acceptance: Acceptance | None = None
    about: About = field(default_factory=About)
    downloads: int | None = None
    problem: str = ""
    fit: FitLevel | None = None
    expected: SpeedEstimate | None = None
    faster: FasterType | None = None

    @property
    def here(self) -> bool:
        """Tells whether target and draft need no download."""
        return self.target.here and (self.draft is None or self.draft.here)

    @property
    def missing(self) -> int | None:
        """Bytes to download, with the draft model; 0 if it is here, None if nothing says."""
        target = self.target.missing
        return None if target is None else target + (self.draft.missing or 0 if self.draft else 0)

    @property
    def plain(self) -> float | None:
        """Tokens/s of plain decoding; None if it cannot be estimated."""
        return 1 / self.expected.rows[1] if self.expected else None

    @property
    def drafted(self) -> tuple[float, float] | None:
        """Tokens/s with the draft model, at low and high acceptance; None without one, or not estimated."""
        if self.expected is None or self.plain is None or self.expected.draft_s is None:
            return None
        low, high = (self.expected.speculative(each)[1] for each in self.acceptance or ASSUMED)
        return self.plain * low, self.plain * high

    @property
    def group(self) -> Group:
        """The group in which it is listed: models of one group are comparable."""
        if self.fit == "does not fit":
            return "too large"
        if self.plain is None:
            return "unknown"
        return "fast" if max(self.plain, self.drafted[0] if self.drafted else 0.0) >= FAST_ENOUGH else "slow"

    @property
    def parameters(self) -> float | None:
        """The number of parameters, in billions."""
        return (self.target.facts.parameters if self.target.facts else None) or self.about.parameters

    @property
    def quality(self) -> str:
        """A word for what to expect of the answers, by the number of parameters; with few bits, also these."""
        if self.parameters is None:
            return ""
        word = next((word for size, word in _WORDS if self.parameters < size), "best")
        bits = 8 * self.target.facts.weights / (self.parameters * 1e9) if self.target.facts else 4.0
        return word if bits >= 4 else f"{word}, {bits:.0f} bit"

    def to_dict(self) -> dict[str, Any]:
        """Returns what JSON has; sizes in bytes, parameters in billions."""
        facts = self.target.facts
        return {
            "name": self.name,
            "backend": self.backend,
            "origin": "registry" if self.downloads is None else "hub",
            "description": self.description,
            "tasks": list(self.about.tasks),
            "license": self.about.license,
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
            "draft": self.draft_by or "ngram",
            "hub_downloads": self.downloads,
            "problem": self.problem or None,
        }


@dataclass(frozen=True, slots=True)
class Query:
    """What to recommend: `text` is searched in names, `max_bytes` limits the download."""

    text: str = ""
    task: Task | None = None
    max_bytes: int | None = None

    def matches(self, entry: Entry) -> bool:
        """Tells whether an alias has the words and the task."""
        named = f"{entry.alias} {entry.description}".casefold()
        has_words = all(word in named for word in self.text.casefold().split())
        return has_words and (self.task is None or self.task in entry.about.tasks)


@dataclass(frozen=True, slots=True)
class Recommendations:
    """Models in order; `notices` say what could not be asked, `speed` is what is measured of this machine."""

    models: Sequence[Candidate]
    notices: Sequence[str] = ()
    speed: MachineSpeed = field(default_factory=MachineSpeed)

    @property
    def advice(self) -> list[str]:
        """Sentences that name the models for which a file with another type of weights would be much faster."""
        by_types: dict[tuple[str, str], list[Candidate]] = {}
        for each in self.models:
            if each.faster is not None:
                by_types.setdefault((each.faster.instead_of, each.faster.name), []).append(each)
        return list(map(_advise, by_types.values()))


@dataclass(slots=True)
class Catalogue:
    """Lists models, and judges them by the memory and speed of this machine.

    hub      offline from the first request on that it has not answered; `unreachable` says why
    backend  of an alias that has models for several runtimes
    """

    registry: Registry
    hub: Hub
    backend: FileBackend
    memory: Memory
    unreachable: str = ""

    def list_local(self, opened: Iterable[Path] = ()) -> list[Candidate]:
        """Aliases in file order, then other downloads (last used first), then those of the files and folders `opened`
        that are in no other group, by their names, then models of other programs; no trained heads.

        Sends no request. Fits are for 8,192 tokens, or the trained context if that is shorter; speeds are not
        estimated. Raises CacheError.
        """
        self.hub = replace(self.hub, offline=True)
        found = self._list_aliases(Query())
        shown = {part.path for each in found for part in (each.target, each.draft) if part and part.path}
        cached = sorted(self.hub.list_models(), key=lambda model: -model.last_used_s)
        for model in cached:
            if model.path not in shown and not is_head(model.path):
                name, target = str(model.reference), _read_local(model.reference, model.path, model.kind, model.size)
                runtime: FileBackend = "mlx" if model.kind == "mlx" else "llamacpp"
                found.append(Candidate(name, "cache", name, runtime, target))
        shown |= {model.path for model in cached}
        others = find_external_models(exclude=shown)
        shown |= {other.path for other in others}
        for path in opened:
            runtime = detect_local_backend(path, prefer_mlx=self.backend == "mlx")
            target, _ = self._find(LocalPath(path), runtime)
            if target.here and path not in shown:
                found.append(Candidate(path.name, "opened", str(path), runtime, target))
        for other in others:
            target = _read_local(LocalPath(other.path), other.path, "gguf", other.size)
            found.append(Candidate(other.name, "elsewhere", str(other.path), "llamacpp", target))
        return [self._judge(each, MachineSpeed()) for each in found]

    def recommend(
        self,
        query: Query,
        report: Callable[[str], None] = lambda text: None,
        *,
        measure: bool = True,
        again: bool = False,
    ) -> Recommendations:
        """The models of the registry that match `query`, and with words or a task those of a search of the hub.

        The order: models that fit and are fast enough, the largest first, since larger ones answer better; then slower
        ones, the fastest first; then those whose speed is not known, the largest first; then those that do not fit, the
        smallest first. Without `measure`, only stored measurements are used; `again` replaces them. `report` is told in
        words what is being done. Raises Cancelled.
        """
        notices = []
        self.unreachable = "Offline mode is on." if self.hub.offline else ""
        report("reading the sizes of the models …")
        found = self._list_aliases(query)
        if (query.text or query.task) and not self.unreachable:
            known = {getattr(each.target.reference, "repo", None) for each in found}
            try:
                report(f"searching {self.hub.endpoint} …")
                found += [each for each in self._search(query) if each.name not in known]
            except EdgespecError as error:
                notices.append(f"The hub was not searched: {error.message}")
        if self.unreachable:
            notices.append(f"{self.unreachable} This is the registry alone; sizes with ~ are estimates.")
        limit = query.max_bytes
        kept = [each for each in found if limit is None or each.missing is None or each.missing <= limit]
        speed, mlx_speed = load_speed(), load_mlx_speed()
        if measure:
            speed = measure_speed(COMMON | self._list_kinds(kept, "llamacpp"), report, again=again)
            mlx_speed = measure_mlx_speed(self._list_kinds(kept, "mlx"), report, again=again)
        both = MachineSpeed({**speed.rates, **mlx_speed.rates})
        return Recommendations(sorted((self._judge(each, both) for each in kept), key=_rank), notices, speed)

    def _list_kinds(self, models: Iterable[Candidate], backend: FileBackend) -> set[str]:
        """The kinds of weights of the models of a runtime that fit."""
        parts = [part for each in models if each.backend == backend for part in (each.target, each.draft)]
        facts = [part.facts for part in parts if part is not None and part.facts is not None]
        return {kind for each in facts if each.needed <= self.memory.usable for kind in each.read}

    def _list_aliases(self, query: Query) -> list[Candidate]:
        return _ask_together(self._describe_alias, filter(query.matches, self.registry.entries.values()))

    def _describe_alias(self, entry: Entry) -> Candidate:
        chosen = self.backend if entry.pair(self.backend) else _OTHER[self.backend]
        pair = entry.pair(chosen)
        assert pair is not None  # every entry has one
        original = entry.originals.draft
        others = [each.about for each in self.registry.entries.values() if original == each.originals.target]
        about = others[0] if original and others else About()
        target, problem = self._find(pair.target, chosen, entry.about)
        draft, _ = self._find(pair.draft, chosen, about) if pair.draft else (None, "")
        return Candidate(
            entry.alias,
            "alias",
            entry.alias,
            chosen,
            target,
            draft,
            entry.description,
            "model" if draft else pair.head_kind or ("mtp" if pair.with_head else ""),
            pair.acceptance,
            entry.about,
            problem=problem,
        )

    def _search(self, query: Query) -> list[Candidate]:
        """The most downloaded repositories that match. Raises HubError."""
        tags = _TAGS[query.task] if query.task else ()
        kind: Kind = "gguf" if self.backend == "llamacpp" else "mlx"

        def describe(found: tuple[str, int, str | None]) -> Candidate:
            repo, downloads, license_ = found
            target, problem = self._find(HubRepo(repo), self.backend)
            said, about = f"{downloads:,} downloads in the last month", About(license=license_)
            return Candidate(
                repo, "hub", repo, self.backend, target, None, said, about=about, downloads=downloads, problem=problem
            )

        return _ask_together(describe, search_repos(self.hub, query.text, kind, tags=tags, limit=_HUB_RESULTS))

    def _find(self, reference: Reference, backend: FileBackend, about: About | None = None) -> tuple[Part, str]:
        """A model, with the size of its files at the hub, and why it cannot be read, else an empty text."""
        check_cancelled()
        name, size, problem = str(reference), None, ""
        try:
            source = resolve_source(reference, backend, self.hub)
            path = find_local(source, self.hub)
            if isinstance(source, RemoteModel):
                name, size = source.files[0].path, source.size
            elif source.kind == "mlx":
                size = sum(file.stat().st_size for file in source.path.glob("*.safetensors")) or None
            else:
                size = read_gguf_size(source.path)
            if path is not None and size is not None:
                return _read_local(reference, path, source.kind, size), ""
        except HubUnreachable as error:
            self.unreachable = self.unreachable or error.message
            self.hub = replace(self.hub, offline=True)
        except EdgespecError as error:
            problem = error.message
        except OSError:  # removed in the meantime
            pass
        return Part(reference, None, size, guess_facts(about or About(), name, size, backend)), problem

    def _judge(self, model: Candidate, speed: MachineSpeed) -> Candidate:
        target, draft = model.target.facts, model.draft.facts if model.draft else None
        if target is None:
            return model
        usable = self.memory.usable
        left = usable - target.needed - (draft.needed if draft else 0)
        fits: FitLevel = "fits" if left >= _MIN_HEADROOM * usable else "tight"
        fit: FitLevel = fits if target.needed <= usable else "does not fit"
        # on several devices a part is computed elsewhere
        is_split = bool(self.memory.own_devices) and self.memory.own_device_bytes < target.needed
        if fit == "does not fit" or (is_split and model.backend != "mlx"):
            return replace(model, fit=fit)
        drafted = draft.read if draft and not target.mixture else None  # rows of a mixture read more than one row does
        expected = speed.estimate(target.read, drafted)
        faster = speed.find_faster(target.read, target.long_blocks) if model.backend != "mlx" else None
        return replace(model, fit=fit, expected=expected, faster=faster)


def _ask_together(ask: Callable[[T], Candidate], items: Iterable[T]) -> list[Candidate]:
    """`ask` of each, in threads that are cancelled with this one."""
    check = current_check()

    def ask_one(item: T) -> Candidate:
        with cancellable(check):
            return ask(item)

    with ThreadPoolExecutor(_REQUESTS) as pool:
        return list(pool.map(ask_one, items))


def _read_local(reference: Reference, path: Path, kind: Kind, size: int) -> Part:
    try:
        return Part(reference, path, size, read_facts(LocalModel(path, kind)))
    except (EdgespecError, OSError, OverflowError):  # OverflowError: a config with absurd numbers
        return Part(reference, path, size)


def _advise(models: Sequence[Candidate]) -> str:
    """One sentence for models that have the same type of weights and the same faster one."""
    best = max((each.faster for each in models if each.faster is not None), key=lambda faster: faster.gain)
    named = [(each.name, each.target.reference) for each in models]
    others = [
        f"{at.repo}:{best.name} for {name}" if isinstance(at, HubFile | HubQuant | HubRepo) else f"a file of {name}"
        for name, at in named
    ]
    return f"{best}: take {', '.join(others[:3])}, where there is one{', and so on' if len(others) > 3 else ''}."


def _rank(model: Candidate) -> tuple[int, float, str]:
    order, size = [*GROUPS].index(model.group), model.parameters or 0.0
    key = {"slow": -(model.plain or 0.0), "too large": size}.get(model.group, -size)
    return order, key, model.name


def format_download(model: Candidate) -> str:
    """What is missing here, with ~ for an estimate."""
    if model.missing is None:
        return "?"
    about = "" if model.target.size is not None else "~"
    return f"{about}{gib(model.missing)}" if model.missing else "here"


def format_plain(model: Candidate) -> str:
    """Tokens/s of plain decoding."""
    return "" if model.plain is None else _format_speed(model.plain)


def format_drafted(model: Candidate) -> str:
    """Tokens/s with the draft model; empty if they depend on the text, or are not known."""
    if model.drafted is None or model.plain is None:
        return ""
    low, high = model.drafted
    return "no gain" if high <= model.plain * 1.02 else f"{_format_speed(low)}-{_format_speed(high)}"


def _format_speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 10 else f"{tokens_per_second:.1f}"
