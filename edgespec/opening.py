"""From what the user asked for to an open Engine: plan, fetch, load; on the thread that will use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.backends import BackendName, Model, open_model, require
from edgespec.backends.options import LoadOptions, idle_cores
from edgespec.calibration import Setting, Store
from edgespec.control.experience import Experience
from edgespec.core.protocols import CheckCancelled
from edgespec.engine import Engine
from edgespec.planning import OpenRequest, Plan, Reporter, fetch, plan
from edgespec.registry.hub import Hub
from edgespec.registry.schema import Registry, SamplingDefaults
from edgespec.speculation import DraftKind, Speculation

_MEASURED_S = 2.0  # of a new pair of models, or of a known one under new settings


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine, and the names that the user knows its parts by."""

    engine: Engine
    name: str
    backend: BackendName
    draft: str  # 'none', 'ngram', or the draft model's name
    sampling: SamplingDefaults
    target_path: Path
    draft_path: Path | None
    setting: Setting
    store: Store | None  # of what is learned; None for the toy runtime

    def keep(self) -> None:
        """Store what the autopilot has learned, for next time."""
        if self.store is not None and self.engine.has_experience:
            self.store.save(self.setting, self.engine.experience)


def open_engine(
    request: OpenRequest, registry: Registry, hub: Hub, reporter: Reporter, check: CheckCancelled
) -> Opened:
    """Bring a model to where it generates, downloading what is missing. Raises any EdgespecError, Cancelled."""
    if request.backend == "toy":
        return _open_toy(request, check)
    planned = plan(request, registry, hub, reporter)
    require(planned.backend)
    speculation = _speculation(request, planned.kind)
    target_path = fetch(planned.target, hub, reporter, check)
    draft_path = fetch(planned.draft.source, hub, reporter, check) if planned.draft else None
    with ExitStack() as undo:
        target = _load(target_path, planned, reporter, check)
        undo.callback(target.close)
        for text in _notices(target, speculation, planned):
            reporter.notice(text)
        engine = _engine(target, draft_path, planned, speculation, reporter, check)
        undo.callback(engine.release_draft)
        opened = Opened(
            engine, planned.name, planned.backend, _draft_name(planned), planned.sampling, target_path, draft_path,
            _setting(planned.backend, planned.options), Store(target_path, draft_path),
        )  # fmt: skip
        _calibrate(opened, reporter, check)
        undo.pop_all()
    return opened


def change_draft(
    opened: Opened, request: OpenRequest, registry: Registry, hub: Hub, reporter: Reporter, check: CheckCancelled
) -> Opened:
    """The open target with another draft, and no second copy of it. On failure `opened` is as it was."""
    if opened.backend == "toy":
        return _open_toy(request, check)
    planned = plan(replace(request, backend=opened.backend), registry, hub, reporter)
    speculation = _speculation(request, planned.kind)
    draft_path = fetch(planned.draft.source, hub, reporter, check) if planned.draft else None
    engine = _engine(opened.engine.target, draft_path, planned, speculation, reporter, check)
    with ExitStack() as undo:
        undo.callback(engine.release_draft)
        store = Store(opened.target_path, draft_path)
        changed = replace(opened, engine=engine, draft=_draft_name(planned), draft_path=draft_path, store=store)
        opened.keep()  # the other may be the same draft again
        _calibrate(changed, reporter, check)
        undo.pop_all()
    opened.engine.release_draft()
    return changed


def _calibrate(opened: Opened, reporter: Reporter, check: CheckCancelled) -> None:
    """Let the autopilot start from what is stored of these models, or measure now what it needs."""
    engine, speculation = opened.engine, opened.engine.speculation
    if speculation.kind == "none" or opened.store is None:
        return
    known = opened.store.load(opened.setting)
    if isinstance(known, Experience):
        engine.experience = known  # also where a length is fixed: a chat may leave it to the autopilot later
    elif speculation.gamma is None:
        if known is not None:
            reporter.notice(f"Measured before with {known}; measuring again.")
        engine.experience = Experience(engine.measure(_MEASURED_S, check))


def _setting(backend: BackendName, options: LoadOptions) -> Setting:
    return Setting.here(
        backend,
        threads=(options.threads or idle_cores()) if backend == "llamacpp" else None,
        gpu_layers=options.gpu_layers,
        kv_type=options.kv_type,
        flash_attention=options.flash_attention,
        exact=options.exact,
    )


def _engine(
    target: Model,
    draft_path: Path | None,
    planned: Plan,
    speculation: Speculation,
    reporter: Reporter,
    check: CheckCancelled,
) -> Engine:
    """An engine on `target`; the draft model is freed again if the engine refuses it."""
    if draft_path is None:
        return Engine(target, None, speculation)
    draft = _load(draft_path, planned, reporter, check)
    with ExitStack() as undo:
        undo.callback(draft.close)
        engine = Engine(target, draft, speculation)
        undo.pop_all()
    return engine


def _load(path: Path, planned: Plan, reporter: Reporter, check: CheckCancelled) -> Model:
    def progress(fraction: float) -> None:
        reporter.loading(path.name, fraction)

    return open_model(planned.backend, path, planned.options, progress=progress, check=check)


def _notices(target: Model, speculation: Speculation, planned: Plan) -> Iterator[str]:
    """What the user asked for that this target or runtime does not do."""
    if target.limitation is not None and speculation.is_tree:
        yield f"This model takes chains, not trees, since {target.limitation}."
    given = planned.options
    idle = {"--threads": given.threads, "--gpu-layers": given.gpu_layers, "--flash-attention": given.flash_attention}
    if planned.backend == "mlx" and (names := [name for name, value in idle.items() if value is not None]):
        yield f"{' and '.join(names)} {'has' if len(names) == 1 else 'have'} no effect on MLX."


def _draft_name(planned: Plan) -> str:
    return str(planned.draft.reference) if planned.draft else planned.kind


def _open_toy(request: OpenRequest, check: CheckCancelled) -> Opened:
    def load(name: str) -> Model:
        return open_model("toy", Path(name), request.load, progress=lambda f: None, check=check)

    name = request.model or "tree"
    kind: DraftKind = "none" if request.draft == "none" else "ngram" if request.draft == "ngram" else "model"
    draft = load("draft" if request.draft in ("auto", "model") else request.draft) if kind == "model" else None
    engine = Engine(load(name), draft, _speculation(request, kind))
    setting = _setting("toy", request.load)
    return Opened(engine, name, "toy", kind, SamplingDefaults(), Path(name), None, setting, None)


def _speculation(request: OpenRequest, kind: DraftKind) -> Speculation:
    return Speculation(kind, 0 if kind == "none" else request.gamma, request.nodes, request.rule)
