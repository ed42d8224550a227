"""From what the user asked for to an open Engine: plan, fetch, load; on the thread that will use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from edgespec.backends import BackendName, Model, open_model, require
from edgespec.backends.attached_draft import SelfDraftModel, SelfDraftSpec, Skip, Unsupported
from edgespec.backends.devices import DeviceMemory
from edgespec.backends.options import LoadOptions, idle_cores
from edgespec.controller.stats import DraftStats
from edgespec.controller.store import ProfileKey, ProfileStore
from edgespec.core.protocols import CheckCancelled
from edgespec.engine.drafting import DraftKind, Speculation
from edgespec.engine.engine import Engine
from edgespec.hub.hub import Hub
from edgespec.planner.memory import Fit
from edgespec.planner.plan import LoadConfig, Plan, Reporter, fetch, plan
from edgespec.planner.selfdraft_search import (
    EVALUATION_S,
    Choice,
    SelfDraftCache,
    SelfDraftSearch,
    all_methods,
    make_self_draft,
    quick_methods,
)
from edgespec.registry.schema import Registry, SamplingDefaults
from edgespec.service.client import ModelInfo

_MEASURED_S = 2.0  # of a new pair of models, or of a known one under new settings


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine with the description of its models, and the place of what it learns.

    info   as it was when the model had been loaded; `describe` gives the present values
    store  None for the toy runtime
    """

    engine: Engine
    info: ModelInfo
    target_path: Path
    draft_path: Path | None
    key: ProfileKey
    store: ProfileStore | None

    def describe(self, devices: tuple[DeviceMemory, ...]) -> ModelInfo:
        """`info` with what changes while the model is open."""
        engine = self.engine
        return replace(
            self.info,
            plain_speed=1 / engine.draft_stats.costs.seconds(1) if engine.has_draft_stats else None,
            speculation=engine.speculation,
            is_paused=engine.is_paused,
            devices=devices,
            max_concurrency=engine.max_concurrency,
        )

    def save_stats(self) -> None:
        """Store what the autopilot has learned, for the next process."""
        if self.store is not None and self.engine.has_draft_stats:
            self.store.save(self.key, self.engine.draft_stats)


def load_engine(
    request: LoadConfig, registry: Registry, hub: Hub, reporter: Reporter, check: CheckCancelled
) -> LoadedModel:
    """Bring a model to where it generates, downloading what is missing. Raises any EdgespecError, Cancelled."""
    if request.backend == "toy":
        return _open_toy(request, check)
    planned = plan(request, registry, hub, reporter)
    require(planned.backend)
    _speculation(request, planned.kind)  # what cannot be is refused before anything is loaded
    target_path = fetch(planned.target, hub, reporter, check)
    with ExitStack() as undo:
        target = _load(target_path, planned, reporter, check)
        undo.callback(target.close)
        loaded = _build(request, planned, target, target_path, hub, reporter, check)
        undo.callback(loaded.engine.release_draft)
        for text in _notices(target, loaded.engine.speculation, planned):
            reporter.notice(text)
        _calibrate(loaded, reporter, check)
        undo.pop_all()
    return loaded


def change_draft(
    loaded: LoadedModel, request: LoadConfig, registry: Registry, hub: Hub, reporter: Reporter, check: CheckCancelled
) -> LoadedModel:
    """The open target with another draft, and no second copy of it. On failure `loaded` is as it was."""
    if loaded.info.backend == "toy":
        return _open_toy(request, check)
    planned = plan(replace(request, backend=loaded.info.backend), registry, hub, reporter)
    changed = _build(request, planned, loaded.engine.target, loaded.target_path, hub, reporter, check)
    with ExitStack() as undo:
        undo.callback(changed.engine.release_draft)
        loaded.save_stats()  # the other may be the same draft again
        _calibrate(changed, reporter, check)
        undo.pop_all()
    loaded.engine.release_draft()
    return changed


def build_drafts(
    request: LoadConfig,
    methods: Sequence[SelfDraftSpec],
    seconds: float,
    registry: Registry,
    hub: Hub,
    reporter: Reporter,
    check: CheckCancelled,
) -> tuple[SelfDraftSearch, Choice]:
    """Make and try `methods` (none: all that may pay) against plain decoding and the paired draft model, and remember
    the best for 'auto', and for the method itself where there is one. Raises any EdgespecError, Cancelled.
    """
    planned = plan(request, registry, hub, reporter)
    require(planned.backend)
    path = fetch(planned.target, hub, reporter, check)
    with ExitStack() as undo:
        target = _load(path, planned, reporter, check)
        undo.callback(target.close)
        rival = None
        if planned.draft is not None:
            rival = _load(fetch(planned.draft.source, hub, reporter, check), planned, reporter, check)
            undo.callback(rival.close)
        shelf = SelfDraftCache(path, planned.name)
        workshop = SelfDraftSearch(target, shelf.folder, seconds, check, reporter.loading)
        choice = workshop.choose(methods or all_methods(planned.backend), rival)
    shelf.remember(
        _profile_key(planned.backend, planned.options), str(methods[0]) if len(methods) == 1 else "auto", choice
    )
    return workshop, choice


def _build(
    request: LoadConfig,
    planned: Plan,
    target: Model,
    target_path: Path,
    hub: Hub,
    reporter: Reporter,
    check: CheckCancelled,
) -> LoadedModel:
    """The target with its draft loaded, which is freed again if the engine refuses it."""
    key = _profile_key(planned.backend, planned.options)
    method = _self_draft(request, planned, target, target_path, key, reporter, check)
    draft: Model | SelfDraftModel | None = None
    draft_path: Path | None = None
    kind: DraftKind = planned.kind
    name: str = planned.kind
    if method is not None:
        kind, name = "model", str(method)
        draft = make_self_draft(
            target, method, SelfDraftCache(target_path, planned.name).folder, partial(reporter.loading, name), check
        )
    elif planned.draft is not None:
        name = str(planned.draft.reference)
        draft_path = fetch(planned.draft.source, hub, reporter, check)
        draft = _load(draft_path, planned, reporter, check)
    with ExitStack() as undo:
        if draft is not None:
            undo.callback(draft.close)
        engine = Engine(target, draft, _speculation(request, kind), planned.options.caches)
        undo.pop_all()
    store = ProfileStore(target_path, draft_path, name if method is not None else "")
    info = _describe(engine, planned.name, planned.backend, name, planned.sampling, planned.fit)
    return LoadedModel(engine, info, target_path, draft_path, key, store)


def _describe(
    engine: Engine, name: str, backend: BackendName, draft: str, sampling: SamplingDefaults, fit: Fit | None
) -> ModelInfo:
    target = engine.target
    return ModelInfo(
        name=name,
        backend=backend,
        draft=draft,
        sampling=sampling,
        chat_template=target.chat_template,
        fit=fit,
        plain_speed=None,
        context_size=target.context_size,
        speculation=engine.speculation,
        is_paused=False,
        devices=(),
        max_concurrency=engine.max_concurrency,
        no_batching_reason=target.no_batching_reason,
    )


def _self_draft(
    request: LoadConfig,
    planned: Plan,
    target: Model,
    target_path: Path,
    key: ProfileKey,
    reporter: Reporter,
    check: CheckCancelled,
) -> SelfDraftSpec | None:
    """How the target is to draft for itself, if it is: as asked, as chosen before, or as trials now say."""
    asked = planned.self_draft
    if asked is not None and asked.skip != Skip():
        return asked
    if asked is None and (request.draft != "auto" or request.gamma == 0):
        return None
    shelf = SelfDraftCache(target_path, planned.name)
    choice = shelf.chosen(key, str(asked or "auto"))
    if choice is None and asked is None and planned.draft is not None:
        return None  # a draft model is at hand; `edgespec draft build` holds others against it
    if choice is None:
        reporter.notice(f"Trying drafts of the model itself, for about {EVALUATION_S:.0f} seconds; this is done once.")
        workshop = SelfDraftSearch(target, shelf.folder, EVALUATION_S, check, reporter.loading)
        try:
            choice = workshop.choose([asked] if asked is not None else quick_methods(planned.backend))
        except Unsupported as refusal:
            if asked is not None:
                raise
            reporter.notice(f"Drafting by {planned.kind}: {refusal.message}")
            return None
        shelf.remember(key, str(asked or "auto"), choice)
    if asked is None and not choice.pays:
        reporter.notice(
            f"Drafting by {planned.kind}; no self-draft promises to pay ({choice.method}: {choice.reason})."
        )
        return None
    reporter.notice(f"Drafting by {choice.method}: {choice.reason}.")
    return choice.method


def _calibrate(loaded: LoadedModel, reporter: Reporter, check: CheckCancelled) -> None:
    """Let the autopilot start from what is stored of these models, or measure now what it needs."""
    engine, speculation = loaded.engine, loaded.engine.speculation
    if speculation.kind == "none" or loaded.store is None:
        return
    known = loaded.store.load(loaded.key)
    if isinstance(known, DraftStats):
        engine.draft_stats = known  # also where a length is fixed: a chat may leave it to the autopilot later
    elif speculation.gamma is None:
        if known is not None:
            reporter.notice(f"Measured before with {known}; measuring again.")
        engine.draft_stats = DraftStats(engine.measure(_MEASURED_S, check))


def _profile_key(backend: BackendName, options: LoadOptions) -> ProfileKey:
    return ProfileKey.current(
        backend,
        threads=(options.threads or idle_cores()) if backend == "llamacpp" else None,
        gpu_layers=options.gpu_layers,
        kv_type=options.kv_type,
        flash_attention=options.flash_attention,
        exact=options.exact,
    )


def _load(path: Path, planned: Plan, reporter: Reporter, check: CheckCancelled) -> Model:
    def progress(fraction: float) -> None:
        reporter.loading(path.name, fraction)

    return open_model(planned.backend, path, planned.options, progress=progress, check=check)


def _notices(target: Model, speculation: Speculation, planned: Plan) -> Iterator[str]:
    """What the user asked for that this target or runtime does not do."""
    if target.no_tree_reason is not None and speculation.is_tree:
        yield f"This model takes chains, not trees, since {target.no_tree_reason}."
    given = planned.options
    idle = {"--threads": given.threads, "--gpu-layers": given.gpu_layers, "--flash-attention": given.flash_attention}
    if planned.backend == "mlx" and (names := [name for name, value in idle.items() if value is not None]):
        yield f"{' and '.join(names)} {'has' if len(names) == 1 else 'have'} no effect on MLX."


def _open_toy(request: LoadConfig, check: CheckCancelled) -> LoadedModel:
    def load(name: str) -> Model:
        return open_model("toy", Path(name), request.load, progress=lambda f: None, check=check)

    name = request.model or "tree"
    kind: DraftKind = "none" if request.draft == "none" else "ngram" if request.draft == "ngram" else "model"
    draft = load("draft" if request.draft in ("auto", "model") else request.draft) if kind == "model" else None
    engine = Engine(load(name), draft, _speculation(request, kind), request.load.caches)
    info = _describe(engine, name, "toy", kind, SamplingDefaults(), None)
    return LoadedModel(engine, info, Path(name), None, _profile_key("toy", request.load), None)


def _speculation(request: LoadConfig, kind: DraftKind) -> Speculation:
    return Speculation(kind, 0 if kind == "none" else request.gamma, request.nodes, request.rule)
