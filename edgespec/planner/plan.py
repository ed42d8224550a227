"""Plan a load before any weights: resolve target and draft, check files, tokenizers and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from edgespec.backends import BackendName, FileBackend, prefers_mlx
from edgespec.backends.attached_draft import SelfDraftSpec
from edgespec.backends.options import DEFAULT_CONTEXT, LoadOptions
from edgespec.core.protocols import CheckCancelled
from edgespec.drafters import DrafterSpec, drafter_specs
from edgespec.engine.drafting import Rule
from edgespec.errors import DoesNotFit, DraftRefused, EdgespecError, UnknownModel
from edgespec.formats.gguf import Header
from edgespec.formats.heads import HeadSpec
from edgespec.formats.metadata import ModelMetadata
from edgespec.hub.hub import Hub
from edgespec.hub.reference import Alias, Reference, parse_reference
from edgespec.planner.draft_request import AUTO, DraftTerm, naming_drafters, parse_draft
from edgespec.planner.heads import choose_head_drafter, read_draft, refuse_draft, refuse_target, refusing_heads
from edgespec.planner.memory import Fit, check_fit, read_memory, shares_context
from edgespec.registry.resolve import (
    ResolvedPair,
    Source,
    detect_backend,
    fetch_source,
    find_pard_token,
    read_metadata,
    resolve_pair,
    resolve_source,
)
from edgespec.registry.schema import Acceptance, Registry, SamplingDefaults
from edgespec.registry.tokenizer_compat import find_tokenizer_mismatch

_EXAMPLES = {"pard": "pard:REF", "eagle3": "eagle3:REF"}  # how a model of the user's is named for a drafter


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """What to load.

    model       a reference, or None for the embedded pair
    backend     None: the best for this machine
    draft       'auto' (all drafters that are available), 'none', or drafters as draft_request.parse_draft takes them
    draft_max   maximum draft depth; None: the autopilot decides
    draft_tree  maximum draft tokens in all; None: as many as draft_max, a chain
    acceptance  the acceptance rule, see engine.drafting.Speculation
    force       load even if it does not fit in memory
    """

    model: str | None = None
    backend: BackendName | None = None
    draft: str = "auto"
    draft_max: int | None = None
    draft_tree: int | None = None
    acceptance: Rule = "auto"
    load: LoadOptions = field(default_factory=LoadOptions)
    force: bool = False


class Reporter(Protocol):
    """Receives the progress of a load."""

    def notice(self, text: str) -> None:
        """One sentence for the user, such as why a draft was rejected."""

    def download(self, name: str, done: int, total: int) -> None:
        """`done` of `total` bytes of a file are downloaded."""

    def loading(self, name: str, fraction: float) -> None:
        """`fraction` of a model is loaded, 0.0 to 1.0."""


@dataclass(frozen=True, slots=True)
class PlannedDrafter:
    """A drafter before anything is loaded for it.

    model       its draft model
    self_draft  how the target drafts for itself
    mask_token  of a PARD model
    head        what the file of `model` says, where that is a trained head
    """

    spec: DrafterSpec
    model: PlannedModel | None = None
    self_draft: SelfDraftSpec | None = None
    mask_token: int | None = None
    head: HeadSpec | None = None

    @property
    def label(self) -> str:
        """What the user calls it."""
        return str((self.model.reference if self.model else None) or self.self_draft or self.spec.name)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A draft model before it is loaded."""

    reference: Reference
    source: Source
    metadata: ModelMetadata


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be loaded.

    drafters    none: plain decoding
    options     with a definite context size
    acceptance  the registry's figures for `draft`, if it is the draft model that the registry pairs with the target
    """

    name: str
    backend: FileBackend
    target: Source
    drafters: tuple[PlannedDrafter, ...]
    options: LoadOptions
    sampling: SamplingDefaults
    metadata: ModelMetadata
    fit: Fit
    acceptance: Acceptance | None = None

    @property
    def models(self) -> list[PlannedModel]:
        """The draft models."""
        return [each.model for each in self.drafters if each.model is not None]

    @property
    def self_draft(self) -> SelfDraftSpec | None:
        """How the target drafts for itself, if that was asked for."""
        return next((each.self_draft for each in self.drafters if each.self_draft is not None), None)


def plan(request: LoadConfig, registry: Registry, hub: Hub, reporter: Reporter) -> Plan:
    """Choose the runtime, resolve the models, read their headers, compare tokenizers, check memory.

    Raises UnknownModel, HubError, InvalidModelFile, DraftRefused, DoesNotFit.
    """
    with refusing_heads(request.model, refuse_target) as check:
        backend = choose_backend(request, registry, hub)
        resolved = resolve_pair(request.model, backend, registry, hub)
        facts = check(read_metadata(resolved.target, hub, reporter.download))
    finder = _DraftFinder(backend, facts, resolved, registry, hub)
    drafters = finder.find_all(reporter) if request.draft == AUTO else finder.find(parse_draft(request.draft))
    options = _set_context_size(request.load, facts, reporter)
    drafters, fit = _check_memory(request, options, backend, facts, drafters, reporter)
    drafts = [each.model.reference for each in drafters if each.model and each.spec.name == "model"]
    acceptance = resolved.acceptance if resolved.draft in drafts else None
    return Plan(
        resolved.name, backend, resolved.target, tuple(drafters), options, resolved.sampling, facts, fit, acceptance
    )


def fetch(source: Source, hub: Hub, reporter: Reporter, check: CheckCancelled = lambda: None) -> Path:
    """The file to load, downloaded if necessary. Raises HubError, CacheError, InvalidModelFile, Cancelled."""

    def progress(name: str, done: int, total: int) -> None:
        check()
        reporter.download(name, done, total)

    return fetch_source(source, hub, progress)


def choose_backend(request: LoadConfig, registry: Registry, hub: Hub) -> FileBackend:
    """The requested runtime, else MLX on Apple Silicon if it is installed and has the model, else llama.cpp.

    Raises UnknownModel, HubError.
    """
    if request.backend in ("llamacpp", "mlx"):
        return request.backend
    return detect_backend(request.model, registry, hub, prefer_mlx=prefers_mlx())


@dataclass(frozen=True, slots=True)
class _DraftFinder:
    """Finds the drafters for one target."""

    backend: FileBackend
    target: ModelMetadata
    pair: ResolvedPair
    registry: Registry
    hub: Hub

    def find_all(self, reporter: Reporter) -> list[PlannedDrafter]:
        """All that are available: those that need nothing, and the models that the registry pairs with the target."""
        found = []
        for spec in drafter_specs().values():
            if spec.needs == "nothing":
                found.append(PlannedDrafter(spec))
            elif spec.needs == "model" and (reference := self._paired(spec)) is not None:
                try:
                    found.append(self._find_model(spec, reference))
                except EdgespecError as refusal:
                    reporter.notice(f"Drafting without {reference}: {refusal.message}")
        return found

    def find(self, terms: Sequence[DraftTerm]) -> list[PlannedDrafter]:
        """Those that the user named. Raises DraftRefused."""
        found = []
        for term in terms:
            if term.spec.needs not in ("model", "head"):
                found.append(PlannedDrafter(term.spec, self_draft=term.self_draft))
                continue
            with naming_drafters(term.reference):
                reference = parse_reference(term.reference) if term.reference is not None else self._paired(term.spec)
                if reference is None:
                    kind = {"pard": "PARD model", "model": "draft model"}.get(term.spec.name, f"{term.spec.name} head")
                    raise DraftRefused(
                        f"no {kind} is paired with this target.",
                        hint=f"Use --draft ngram, or name one: --draft {_EXAMPLES.get(term.spec.name, 'REF')}.",
                    )
                found.append(self._find_model(term.spec, reference))
        return found

    def _paired(self, spec: DrafterSpec) -> Reference | None:
        """The model that the registry names for `spec` and this target."""
        return {"pard": self.pair.pard, "model": self.pair.draft}.get(spec.name)

    def _find_model(self, spec: DrafterSpec, reference: Reference) -> PlannedDrafter:
        """Raises DraftRefused for a model that cannot draft for the target."""
        if isinstance(reference, Alias):
            pair = self.registry.get(reference.name).pair(self.backend)
            if pair is None:
                raise UnknownModel(f"{reference.name} has no model for {self.backend}.", hint="Name another draft.")
            reference = pair.target
        with refusing_heads(reference, partial(refuse_draft, self.backend)) as check:
            source = resolve_source(reference, self.backend, self.hub)
            facts, head = read_draft(source, self.hub)
            check(facts)
        spec = choose_head_drafter(spec, reference, head, self.target)
        has_vocabulary = head is None or isinstance(facts, Header)  # folders of heads have no tokenizer
        if has_vocabulary and (reason := find_tokenizer_mismatch(self.target, facts)):
            raise DraftRefused(
                f"{reference} cannot draft for this target: {reason}.", hint="Use --draft ngram, or another."
            )
        token = find_pard_token(facts)
        if token is None and reference == self.pair.pard:
            token = self.pair.pard_token
        if spec.name == "pard" and token is None:
            raise DraftRefused(
                f"{reference} names no mask token, so it is not known to be a PARD model.",
                hint="Set pard and pard_token for the target in models.toml.",
            )
        return PlannedDrafter(spec, PlannedModel(reference, source, facts), mask_token=token, head=head)


def _set_context_size(options: LoadOptions, facts: ModelMetadata, reporter: Reporter) -> LoadOptions:
    """`options` with a definite context size."""
    trained = max(facts.trained_context or DEFAULT_CONTEXT, 8)
    size = options.context_for(trained)
    if size > trained:
        reporter.notice(f"The model was trained for {trained:,} tokens; beyond them its answers lose quality.")
    return replace(options, context_size=size)


def _check_memory(
    request: LoadConfig,
    options: LoadOptions,
    backend: FileBackend,
    target: ModelMetadata,
    drafters: list[PlannedDrafter],
    reporter: Reporter,
) -> tuple[list[PlannedDrafter], Fit]:
    """The drafters, and the fit; 'auto' drops draft models, the last one first, so that the target fits.

    Raises DoesNotFit.
    """
    memory = read_memory(backend)
    context = options.context_size
    assert context is not None  # set by _set_context_size
    check = partial(
        check_fit,
        target,
        context=context,
        memory=memory,
        kv_type=options.kv_type,
        caches=options.caches,
        together=shares_context(target) and not options.exact,
        force=request.force,
    )
    while True:
        models = [each for each in drafters if each.model is not None]
        try:
            return drafters, check([each.model.metadata for each in models if each.model is not None])
        except DoesNotFit:
            if not models or request.draft != AUTO:
                raise
            reporter.notice(f"Drafting without {models[-1].label}: it does not fit in memory with the target.")
            drafters = [each for each in drafters if each is not models[-1]]
