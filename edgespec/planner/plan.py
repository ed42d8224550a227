"""Plan a load before any weights: resolve target and draft, check files, tokenizers and memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from edgespec.backends import BackendName, FileBackend, device_memory, prefers_mlx
from edgespec.backends.attached_draft import SelfDraftSpec, parse
from edgespec.backends.devices import DeviceMemory, host_memory
from edgespec.backends.options import DEFAULT_CONTEXT, LoadOptions
from edgespec.core.protocols import CheckCancelled
from edgespec.engine.drafting import DraftKind, Rule
from edgespec.errors import BackendUnavailable, DoesNotFit, DraftRefused, EdgespecError, UnknownModel
from edgespec.formats.metadata import ModelMetadata
from edgespec.hub.hub import Hub
from edgespec.hub.reference import Alias, Reference, parse_reference
from edgespec.planner.memory import Fit, check_fit, shares_context
from edgespec.registry.resolve import Source, detect_backend, fetch_source, read_metadata, resolve_pair, resolve_source
from edgespec.registry.schema import Acceptance, Registry, SamplingDefaults
from edgespec.registry.tokenizer_compat import find_tokenizer_mismatch


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """What to load.

    model       a reference, or None for the embedded pair
    backend     None: the best for this machine
    draft       'auto', 'model' (the registry's draft model for the target), 'ngram', 'none', a self-draft as
                backends.attached_draft.parse takes it, or a model reference
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
class PlannedDraft:
    """A draft model before it is loaded."""

    reference: Reference
    source: Source
    metadata: ModelMetadata


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be loaded.

    draft, self_draft    both None: drafting by n-grams or plain decoding, as `kind` says
    options     with a definite context size
    acceptance  the registry's figures for `draft`, if it is the draft model that the registry pairs with the target
    """

    name: str
    backend: FileBackend
    target: Source
    draft: PlannedDraft | None
    self_draft: SelfDraftSpec | None
    kind: DraftKind
    options: LoadOptions
    sampling: SamplingDefaults
    metadata: ModelMetadata
    fit: Fit
    acceptance: Acceptance | None = None


def plan(request: LoadConfig, registry: Registry, hub: Hub, reporter: Reporter) -> Plan:
    """Choose the runtime, resolve both models, read their headers, compare tokenizers, check memory.

    Raises UnknownModel, HubError, InvalidModelFile, DraftRefused, DoesNotFit.
    """
    backend = choose_backend(request, registry, hub)
    resolved = resolve_pair(request.model, backend, registry, hub)
    facts = read_metadata(resolved.target, hub, reporter.download)
    self_draft = parse(request.draft)
    draft = None if self_draft else _find_draft(request, resolved.draft, backend, facts, registry, hub, reporter)
    options = _set_context_size(request.load, facts, reporter)
    draft, fit = _check_memory(request, options, backend, facts, draft, reporter)
    kind: DraftKind = "model" if draft or self_draft else "none" if request.draft == "none" else "ngram"
    acceptance = resolved.acceptance if draft is not None and draft.reference == resolved.draft else None
    return Plan(
        resolved.name,
        backend,
        resolved.target,
        draft,
        self_draft,
        kind,
        options,
        resolved.sampling,
        facts,
        fit,
        acceptance,
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
    return detect_backend(request.model, registry, hub, prefer_mlx=prefers_mlx() and not request.load.exact)


def _find_draft(
    request: LoadConfig,
    paired: Reference | None,
    backend: FileBackend,
    target: ModelMetadata,
    registry: Registry,
    hub: Hub,
    reporter: Reporter,
) -> PlannedDraft | None:
    """The draft model for `request.draft`, with a compatible tokenizer; None for drafting without a model.

    Raises DraftRefused for an unusable draft that the user named; 'auto' falls back to n-grams with a notice.
    """
    if request.draft in ("none", "ngram") or (request.draft == "auto" and paired is None):
        return None
    if request.draft == "auto":
        assert paired is not None
        try:
            return _check_draft(paired, backend, target, registry, hub)
        except EdgespecError as refusal:
            reporter.notice(f"Drafting by n-grams, without {paired}: {refusal.message}")
            return None
    if request.draft == "model":
        if paired is None:
            raise DraftRefused("no draft model is paired with this target.", hint="Use --draft ngram, or name one.")
        return _check_draft(paired, backend, target, registry, hub)
    return _check_draft(parse_reference(request.draft), backend, target, registry, hub)


def _check_draft(
    reference: Reference, backend: FileBackend, target: ModelMetadata, registry: Registry, hub: Hub
) -> PlannedDraft:
    if isinstance(reference, Alias):
        pair = registry.get(reference.name).pair(backend)
        if pair is None:
            raise UnknownModel(f"{reference.name} has no model for {backend}.", hint="Name another draft.")
        reference = pair.target
    source = resolve_source(reference, backend, hub)
    facts = read_metadata(source, hub)
    if reason := find_tokenizer_mismatch(target, facts):
        raise DraftRefused(
            f"{reference} cannot draft for this target: {reason}.", hint="Use --draft ngram, or another."
        )
    return PlannedDraft(reference, source, facts)


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
    draft: PlannedDraft | None,
    reporter: Reporter,
) -> tuple[PlannedDraft | None, Fit]:
    """The draft, or None if 'auto' drops it so that the target fits; and the fit. Raises DoesNotFit."""
    memory = host_memory(_devices(backend))
    kv_type = "q8_0" if options.exact else options.kv_type
    context = options.context_size
    assert context is not None  # set by _set_context_size

    together = shares_context(target) and not options.exact

    def check(with_draft: ModelMetadata | None) -> Fit:
        return check_fit(
            target,
            with_draft,
            context=context,
            memory=memory,
            kv_type=kv_type,
            caches=options.caches,
            together=together,
            force=request.force,
        )

    try:
        return draft, check(draft.metadata if draft else None)
    except DoesNotFit:
        if draft is None or request.draft != "auto":
            raise
        fit = check(None)
        reporter.notice(f"Drafting by n-grams: {draft.reference} does not fit in memory with the target.")
        return None, fit


def _devices(backend: FileBackend) -> tuple[DeviceMemory, ...]:
    try:
        return device_memory(backend)
    except BackendUnavailable:  # `pull` works without the runtime
        return ()
