"""From what the user asked for to an open Engine: plan, fetch, load; on the thread that will use it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from edgespec.backends import BackendName, Model, open_model
from edgespec.core.protocols import CheckCancelled
from edgespec.engine import DraftKind, Engine, Speculation
from edgespec.planning import OpenRequest, Reporter, fetch, plan
from edgespec.registry.hub import Hub
from edgespec.registry.schema import Registry, SamplingDefaults

DEFAULT_GAMMA = 3


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine, and the names that the user knows its parts by."""

    engine: Engine
    name: str
    backend: BackendName
    draft: str  # 'none', 'ngram', or the draft model's name
    sampling: SamplingDefaults


def open_engine(
    request: OpenRequest, registry: Registry, hub: Hub, reporter: Reporter, check: CheckCancelled
) -> Opened:
    """Bring a model to where it generates, downloading what is missing. Raises any EdgespecError, Cancelled."""
    if request.backend == "toy":
        return _open_toy(request, check)
    planned = plan(request, registry, hub, reporter)
    draft = planned.draft
    target_path = fetch(planned.target, hub, reporter)
    draft_path = fetch(draft.source, hub, reporter) if draft else None
    with ExitStack() as undo:

        def load(path: Path) -> Model:
            model = open_model(
                "llamacpp", path, planned.options, progress=lambda f: reporter.loading(path.name, f), check=check
            )
            undo.callback(model.close)
            return model

        target = load(target_path)
        draft_model = load(draft_path) if draft_path else None
        engine = Engine(target, draft_model, _speculation(request, planned.kind))
        undo.pop_all()
    draft_name = str(draft.reference) if draft else planned.kind
    return Opened(engine, planned.name, "llamacpp", draft_name, planned.sampling)


def _open_toy(request: OpenRequest, check: CheckCancelled) -> Opened:
    def load(name: str) -> Model:
        return open_model("toy", Path(name), request.load, progress=lambda f: None, check=check)

    name = request.model or "tree"
    kind: DraftKind = "none" if request.draft == "none" else "ngram" if request.draft == "ngram" else "model"
    draft = load("draft" if request.draft in ("auto", "model") else request.draft) if kind == "model" else None
    return Opened(Engine(load(name), draft, _speculation(request, kind)), name, "toy", kind, SamplingDefaults())


def _speculation(request: OpenRequest, kind: DraftKind) -> Speculation:
    gamma = 0 if kind == "none" else DEFAULT_GAMMA if request.gamma is None else request.gamma
    return Speculation(kind, gamma, gamma if request.nodes is None else request.nodes, request.rule)
