"""Which models suit this machine: those of the registry and of a search of the hub, by fit and expected speed.

The order: models that fit and are fast enough, the largest first, since larger ones answer better; then slower ones,
the fastest first; then those whose speed is not known, the largest first; then those that do not fit, the smallest
first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from edgespec.backends import FileBackend
from edgespec.backends.devices import Memory
from edgespec.controller.cost_model import choose_chain_length
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import EdgespecError
from edgespec.hub.errors import HubUnreachable
from edgespec.hub.hub import Hub
from edgespec.hub.reference import HubFile, HubQuant, HubRepo, Reference
from edgespec.planner.candidates import Candidate, Query, list_candidates, search_candidates
from edgespec.planner.catalogue import FitLevel, rate_fit
from edgespec.planner.machine_speed import Rate, load_rate, measure_rate
from edgespec.planner.model_facts import ModelFacts, guess_facts, read_facts
from edgespec.registry.about import About
from edgespec.registry.resolve import HubGguf, HubMlx, resolve_source
from edgespec.registry.schema import Acceptance, Registry
from edgespec.units import gib

FAST_ENOUGH = 10.0  # tokens/s, faster than most people read
ASSUMED: Acceptance = (0.5, 0.8)  # acceptance per draft token if the registry states none
_OVERSIZE = 1.5  # of the memory: headers of larger models are not read
_REQUESTS = 8  # at a time
_WORDS = ((1, "toy"), (3, "simple"), (7, "fair"), (20, "good"), (60, "strong"))  # below so many billion parameters

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

    facts    None where nothing says how large it is
    missing  bytes to download, with the draft model; 0 if it is here, None where nothing says
    plain    tokens/s of plain decoding; None where it cannot be estimated
    drafted  tokens/s with the draft model, at low and high acceptance; None without one, or not estimated
    problem  why nothing could be read from the hub, else empty
    """

    candidate: Candidate
    facts: ModelFacts | None
    missing: int | None
    fit: FitLevel | None = None
    plain: float | None = None
    drafted: tuple[float, float] | None = None
    problem: str = ""

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
        """In billions."""
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
        """As JSON; sizes in bytes, parameters in billions."""
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
            "draft": candidate.draft_by or "ngram",
            "hub_downloads": candidate.downloads,
            "problem": self.problem or None,
        }


@dataclass(frozen=True, slots=True)
class Recommendations:
    """In order; `notices` say what could not be asked."""

    models: Sequence[Recommendation]
    notices: Sequence[str] = ()


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
    _rates: dict[str, Rate | None] = field(default_factory=dict)
    _unreachable: str = ""  # why the hub is not asked

    def recommend(self, query: Query, *, measure: bool = True) -> Recommendations:
        """The models that match `query`. Without `measure`, only stored measurements are used. Raises Cancelled."""
        self._unreachable = "Offline mode is on." if self.hub.offline else ""
        candidates, notices = [*list_candidates(self.registry, self.backend, query)], []
        if query.text or query.task:
            known = {getattr(each.target, "repo", None) for each in candidates}
            try:
                self.report(f"searching {self.hub.endpoint} …")
                found = search_candidates(self.hub, self.backend, query)
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
        kept = [each for each in sized if limit is None or each[0].missing is None or each[0].missing <= limit]
        if measure:
            self._measure([facts for each, draft in kept for facts in (each.facts, draft) if facts])
        return Recommendations(sorted((self._judge(*each) for each in kept), key=_rank), notices)

    def _size(self, candidate: Candidate) -> tuple[Recommendation, ModelFacts | None]:
        """The sizes of a model and of its draft, from headers if they may fit; else from files or parameters."""
        self.check()
        guessed, draft = guess_facts(candidate.about), None
        guess = Recommendation(candidate, guessed, guessed.weights if guessed else None)
        is_huge = guessed is not None and guessed.weights > _OVERSIZE * self.memory.usable
        if (is_huge or self._unreachable) and not self._is_here(candidate.target):
            return guess, None
        try:
            facts, missing = self._read(candidate.target, candidate.backend, candidate.about)
            if candidate.draft is not None:
                draft, more = self._read(candidate.draft, candidate.backend, About())
                missing += more
        except HubUnreachable as error:
            self._unreachable = self._unreachable or error.message
            return guess, None
        except EdgespecError as error:
            return Recommendation(candidate, guessed, guess.missing, problem=error.message), None
        return Recommendation(candidate, facts, missing), draft

    def _is_here(self, reference: Reference) -> bool:
        if not isinstance(reference, HubRepo | HubQuant | HubFile):
            return True
        return self.hub.find_cached(reference) is not None

    def _read(self, reference: Reference, backend: FileBackend, about: About) -> tuple[ModelFacts | None, int]:
        """The facts of a model and the bytes to download. Raises EdgespecError."""
        source = resolve_source(reference, backend, self.hub)
        if not isinstance(source, HubGguf | HubMlx):
            return read_facts(source, self.hub), 0
        size = source.model.size
        missing = 0 if self._is_here(reference) else size
        if size > _OVERSIZE * self.memory.usable:
            return guess_facts(about, size), missing
        return read_facts(source, self.hub), missing

    def _measure(self, models: Sequence[ModelFacts]) -> None:
        """Measure the types of weights of those that may fit, unless their rates are stored."""
        kinds = {each.kind for each in models if each.kind and each.needed <= self.memory.usable}
        for kind in sorted(kinds):
            self.check()
            if self.measures_again or self._find_rate(kind) is None:
                self.report(f"measuring this machine with {kind} weights, once …")
                self._rates[kind] = measure_rate(kind, self.check)

    def _find_rate(self, kind: str | None) -> Rate | None:
        if kind is not None and kind not in self._rates:
            self._rates[kind] = load_rate(kind)
        return self._rates[kind] if kind is not None else None

    def _judge(self, sized: Recommendation, draft: ModelFacts | None) -> Recommendation:
        candidate, target = sized.candidate, sized.facts
        if target is None:
            return sized
        fit = rate_fit(target.needed, draft.needed if draft else 0, self.memory)
        plain, drafted = (None, None) if fit == "does not fit" else self._foretell(target, draft, candidate.acceptance)
        return Recommendation(candidate, target, sized.missing, fit, plain, drafted, sized.problem)

    def _foretell(
        self, target: ModelFacts, draft: ModelFacts | None, acceptance: Acceptance | None
    ) -> tuple[float | None, tuple[float, float] | None]:
        """(tokens/s plain, with drafts at low and high acceptance)."""
        rate = self._find_rate(target.kind)
        if rate is None or 0 < self.memory.own_device_bytes < target.needed:  # then a part is computed elsewhere
            return None, None
        rows = rate.forward_s(target.read)
        plain, draft_rate = 1 / rows[1], self._find_rate(draft.kind) if draft else None
        if draft is None or draft_rate is None or target.mixture:  # rows of a mixture read more than one row does
            return plain, None
        draft_s = draft_rate.forward_s(draft.read)[1]
        low, high = (choose_chain_length(rows, draft_s, each)[1] for each in acceptance or ASSUMED)
        return plain, (plain * low, plain * high)


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
