"""Loads what drafters need: draft models, self-drafts, and heads in the reading that agrees best with their target."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from edgespec.backends import Model, open_model
from edgespec.backends.attached_draft import AttachedHead, Unsupported
from edgespec.engine.head_probe import HeadProbe, ProbeResult, describe_reading
from edgespec.engine.loaded_drafter import LoadedDrafter
from edgespec.engine.probe_store import ProbeStore
from edgespec.engine.selfdraft_cache import SelfDraftCache
from edgespec.engine.selfdraft_search import make_self_draft
from edgespec.errors import Cancelled, DraftRefused, EdgespecError, reason_of
from edgespec.formats.heads import HeadSpec
from edgespec.models.adapted import describe_version, watch
from edgespec.models.draft_words import AUTO
from edgespec.models.drafts import DrafterPlan
from edgespec.models.hub import Hub
from edgespec.models.load_config import LoadConfig
from edgespec.models.plan import Plan
from edgespec.models.resolve import fetch_source
from edgespec.progress import loading, notice


def load_drafters(
    plans: Iterable[DrafterPlan], target: Model, target_path: Path, planned: Plan, hub: Hub, config: LoadConfig
) -> list[LoadedDrafter]:
    """The drafters of `plans` for the open `target`, without heads that 'auto' has found and that cannot be used.

    What is loaded is freed again if one is refused. Raises EdgespecError, Cancelled.
    """
    found = []
    with ExitStack() as undo:
        for each in plans:
            path = fetch_source(each.model.source, hub) if each.model is not None else None
            plan = watch(each, target_path, path, config.adapted)
            try:
                loaded = load_drafter(plan, path, target, target_path, planned)
            except EdgespecError as refusal:
                if plan.head is None or config.draft != AUTO:
                    raise
                notice(f"Drafting without {plan.label}: {refusal.message}")
                continue
            undo.callback(loaded.close)
            found.append(loaded)
        undo.pop_all()
    return found


def load_drafter(
    plan: DrafterPlan, path: Path | None, target: Model, target_path: Path, planned: Plan
) -> LoadedDrafter:
    """The drafter of `plan`, whose draft model or head is at `path`. Raises EdgespecError, Cancelled."""
    if plan.self_draft is not None:
        folder = SelfDraftCache(target_path, planned.name).folder
        with loading(str(plan.self_draft)):
            return LoadedDrafter(plan, make_self_draft(target, plan.self_draft, folder))
    if path is None:
        return LoadedDrafter(plan)
    if plan.head is not None:
        source: Model | AttachedHead = _load_head(plan, plan.head, path, target, target_path, planned)
    else:
        source = load_weights(path, planned.alone)
    if plan.card is not None:
        notice(describe_version(plan.card))
    return LoadedDrafter(plan, source)


def load_weights(path: Path, planned: Plan) -> Model:
    """Open the file or folder at `path`. Raises EdgespecError, Cancelled."""
    if planned.network is not None:
        notice(planned.network.describe())
    with loading(path.name):
        return open_model(planned.backend, path, planned.options)


def _load_head(
    plan: DrafterPlan, spec: HeadSpec, path: Path, target: Model, target_path: Path, planned: Plan
) -> AttachedHead:
    """The head in the reading that a probe finds, or has found. A probe that fails is told and changes nothing."""
    result, problem = _find_reading(target, spec, (target_path, path), planned)
    with loading(path.name):
        head = target.load_head(result.chosen.spec if result else spec, path)
    head.shorten()
    if plan.found:
        notice(plan.found)
    if result is None:
        notice(f"The head {plan.label} is read as its file says, since it could not be probed: {problem}.")
    elif result.is_corrected:
        depths = "{:.0%} and {:.0%}".format(*result.chosen.agreement)
        notice(
            f"The head is read with {describe_reading(result.chosen.spec)}, where its file says "
            f"{describe_reading(spec)}: agreement {depths} at depths 1 and 2."
        )
    return head


def _find_reading(
    target: Model, spec: HeadSpec, paths: tuple[Path, Path], planned: Plan
) -> tuple[ProbeResult | None, str]:
    """(the stored result of a probe, or that of one which runs now and is stored, ""); (None, why) if it fails."""
    store = ProbeStore(*paths)
    result = store.load(planned.backend, spec)
    if result is not None:
        return result, ""
    try:
        result = HeadProbe(target, paths[1], planned.backend).run(spec)
    except (Cancelled, Unsupported, DraftRefused):  # the last two if no reading can be run
        raise
    except Exception as error:  # noqa: BLE001 - whatever a runtime raises, the load goes on
        return None, reason_of(error)
    store.save(planned.backend, spec, result)
    return result, ""
